"""Every architecture that lets others compute its experts: logits against transformers' own, and the table of docs.

pytest --update-docs writes the table.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: no architecture was tested")

import torch
import transformers
from hf_models import Architecture, architectures, build, eager_logits, error, logits

from kt_kernel.hf import KTConfig, sources
from kt_kernel.hf.forward import KTLayer
from kt_kernel.hf.linear import KTLinear

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/transformers.md"
TABLE = re.compile(r"(?<=<!-- pytest --update-docs writes this -->\n).*?(?=<!-- end -->)", re.DOTALL)

# |error| / |logits| of two layers whose experts compute in bf16: 0.001 to 0.01 measured.
LIMIT = 0.02
# What the logits must change by when experts give nothing.
CONTROL = 0.2

ARCHITECTURES = architectures()


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Tiny models gain nothing from threads, and families tell about packages that they would like."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


class Outcome(NamedTuple):
    model: str  # its class
    ways: tuple[str, ...]
    reason: str | None
    error: float
    error_of_tensors: float  # when transformers merges and we pack
    control: float  # the change without experts


@pytest.fixture(scope="module")
def measure(tmp_path_factory):
    @cache
    def measured(architecture: Architecture) -> Outcome:
        model = build(architecture)
        expected = eager_logits(model)
        folder = tmp_path_factory.mktemp(architecture.name)
        model.save_pretrained(folder)
        loaded = load(type(model), folder)
        choices = list(loaded.hf_quantizer.choices.values())
        got = logits(loaded)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KTLayer, "__call__", lambda _self, x, *_: torch.zeros_like(x))
            patch.setitem(transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS, "grouped_mm", lambda _, x, *__: 0 * x)
            without = logits(loaded)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "_objection", lambda *_: "a test says so")
            of_tensors = logits(load(type(model), folder))
        return Outcome(
            type(model).__name__,
            tuple(sorted({choice.way.value for choice in choices})),
            next((choice.reason for choice in choices if choice.reason), None),
            error(got, expected),
            error(of_tensors, expected),
            error(without, expected),
        )

    return measured


def load(cls, folder: Path, **options):
    config = KTConfig(threads=2, subpools=1, **options)
    return cls.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_an_architecture(architecture, measure):
    outcome = measure(architecture)
    assert outcome.error < LIMIT
    assert outcome.error_of_tensors < LIMIT
    assert outcome.control > CONTROL


# Whose code reads parameters of linears, or whose routers are linears.
@pytest.mark.parametrize("name", ["deepseek_v32", "glm5_next", "granitemoe", "hy_v4", "jamba", "mixtral"])
def test_packed_linears(name, tmp_path):
    model = build(next(architecture for architecture in ARCHITECTURES if architecture.name == name))
    expected = eager_logits(model)
    model.save_pretrained(tmp_path)
    loaded = load(type(model), tmp_path, linears="bf16")
    assert sum(isinstance(module, KTLinear) for module in loaded.modules()) > 5
    assert error(logits(loaded), expected) < 2 * LIMIT


def test_architectures_are_found():
    names = {architecture.name for architecture in ARCHITECTURES}
    assert names >= {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "gemma4", "nemotron_h"}
    assert "llama" not in names


def test_the_table_is_up_to_date(measure, pytestconfig):
    page = PAGE.read_text()
    table = table_of({architecture.name: measure(architecture) for architecture in ARCHITECTURES})
    if pytestconfig.getoption("update_docs"):
        PAGE.write_text(TABLE.sub(lambda _: table, page))
        return
    assert TABLE.search(page)[0] == table, f"{PAGE.name} is stale: run pytest {Path(__file__).name} --update-docs"


def table_of(outcomes: dict[str, Outcome]) -> str:
    rows = ["| Architecture | Tried with | Experts come by | Why not from files |", "|---|---|---|---|"]
    for name, outcome in outcomes.items():
        rows.append(f"| {name} | {outcome.model} | {', '.join(outcome.ways)} | {outcome.reason or ''} |")
    return "\n".join([*rows, "", f"{len(outcomes)} architectures, transformers {transformers.__version__}.", ""])
