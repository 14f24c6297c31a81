"""What each method costs the demo model: its perplexity on a fixed text, beside the dense original in f32.

Everything but the experts is f32, so that what is measured is theirs.
"""

import tempfile
from dataclasses import dataclass
from math import exp
from pathlib import Path

from kt_kernel import __cpu_variant__
from kt_kernel.bench import perplexity
from kt_kernel.bench.client import Client
from kt_kernel.bench.errors import BenchError, need_engine
from kt_kernel.bench.progress import Progress
from kt_kernel.bench.run import Findings
from kt_kernel.demo.copies import GGUF_TYPES
from kt_kernel.methods import LLAMAFILE


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    method: str
    weights: str  # what the layers are loaded from


_QUANTISED = "the checkpoint, in bf16"
_SEARCHED = "kt quant, searched scales"
CASES = (
    Case("BF16", _QUANTISED),
    Case("AMXINT8", _QUANTISED),
    Case("INT4G", _QUANTISED),
    Case("AMXINT4", _QUANTISED),
    *(Case(method, _SEARCHED) for method in ("AMXINT8", "INT4G", "AMXINT4")),
    Case("FP8", "e4m3, blocks of 64 x 64"),
    *(Case(LLAMAFILE, kind.upper()) for kind in GGUF_TYPES),
)


def measure_quality(cases: list[Case], findings: Findings, progress: Progress, tokens: int | None = None) -> None:
    need_engine()
    with Client("quality") as side:
        progress.say("the dense model, f32")
        dense = side.call("dense", tokens=tokens)
        progress.done()
        for case in cases:
            progress.say(f"{case.method} ({case.weights})")
            found = side.call("case", index=CASES.index(case))
            findings.figures.append(quality_figure(case, dense, found))
            progress.done()


def quality_figure(case: Case, dense: dict, found: dict) -> dict:
    return {
        "part": "quality",
        "variant": __cpu_variant__,
        "method": case.method,
        "weights": case.weights,
        "tokens": dense["tokens"],
        "bytes_per_weight": round(found["bytes_per_weight"], 3),
        "dense_perplexity": round(exp(dense["loss"]), 4),
        "perplexity": round(exp(found["loss"]), 4),
        "change": round(exp(found["loss"] - dense["loss"]) - 1, 5),
        "divergence": round(found["divergence"], 6),
        "same_token": round(found["same_token"], 4),
    }


class QualitySide:
    """Answers the requests of ``client``; every public method is one."""

    def __init__(self) -> None:
        import torch

        from kt_kernel.demo import demo_model

        self._torch = torch
        self._path = demo_model()
        self._windows: list = []
        self._reference: list = []  # logarithms of probabilities, for each window

    def dense(self, tokens: int | None) -> dict:
        from transformers import AutoTokenizer

        from kt_kernel.demo.dense import dense_model

        self._windows = perplexity.windows_of(AutoTokenizer.from_pretrained(self._path), tokens)
        self._reference = perplexity.log_probabilities(dense_model(), self._windows)
        count = sum(window.shape[1] - 1 for window in self._windows)
        return {"tokens": count, "loss": perplexity.loss(self._windows, self._reference)}

    def case(self, index: int) -> dict:
        with tempfile.TemporaryDirectory() as work:
            model = self._load(CASES[index], Path(work))
        found = perplexity.log_probabilities(model, self._windows)
        return {
            "loss": perplexity.loss(self._windows, found),
            "bytes_per_weight": _bytes_per_weight(model),
            **perplexity.distance(self._reference, found),
        }

    def _load(self, case: Case, work: Path):
        from transformers import AutoModelForCausalLM

        from kt_kernel.hf import KTConfig

        weights = _weights(case, self._path, work)
        config = KTConfig(method=case.method, weight_path=weights)
        return AutoModelForCausalLM.from_pretrained(
            self._path, quantization_config=config, dtype=self._torch.float32, local_files_only=True
        )


def _weights(case: Case, model: Path, work: Path) -> Path | None:
    """Where the layers of a case are loaded from, if not from the checkpoint."""
    from kt_kernel.demo import copies

    if case.method == LLAMAFILE:
        return copies.write_gguf(model, work / "experts.gguf", case.weights.lower(), experts_only=True)
    if case.method == "FP8":
        return copies.write_fp8(model, work)
    if case.weights == _SEARCHED:
        return _convert(model, work / "converted", case.method)
    return None


def _convert(model: Path, folder: Path, method: str) -> Path:
    from kt_kernel.convert import Settings, convert
    from kt_kernel.convert.engine import QUANT_METHODS

    name = next(name for name, other in QUANT_METHODS.items() if other == method)
    convert(Settings(model, folder, name), Nobody())
    return folder


class Nobody:
    """Watches a conversion and says nothing."""

    def note(self, text: str) -> None: ...

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, count: int) -> None: ...

    def finished(self, layer_idx: int, record: object) -> None: ...


def _bytes_per_weight(model) -> float:
    layers = [module.kt_layer.wrapper.moe for module in model.modules() if hasattr(module, "kt_layer")]
    if not layers:
        raise BenchError("no experts of the model run on our kernels")
    weights = 3 * layers[0].hidden_size * layers[0].intermediate_size
    return layers[0].packed_bytes_per_expert / weights
