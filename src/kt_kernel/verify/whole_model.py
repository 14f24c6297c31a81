"""A whole model on a short text: the chosen method beside bf16, by what they expect of the next token."""

import gc
import re
from importlib.util import find_spec
from math import exp, prod
from pathlib import Path

from kt_kernel.bench import perplexity
from kt_kernel.machine.system import available_bytes
from kt_kernel.methods import LLAMAFILE
from kt_kernel.verify.limits import divergence_limit
from kt_kernel.weights import choose_format, find_method, model_config
from kt_kernel.weights.detect import Kind, holds_only_gguf, locate
from kt_kernel.weights.tensor_files import TensorFiles

# Activations, logits of a window, and what transformers keeps while it loads.
_SPARE_BYTES = 1 << 30


class NotMeasuredError(Exception):
    """The model cannot be run whole here; the message says why."""


def compare(path: Path, method: str, tokens: int, threads: int | None = None, trust_remote_code: bool = False) -> dict:
    """What was found, in plain values.

    The reference is our BF16 kernels; of a method that is BF16 itself, transformers' own experts in f32. Everything but
    the experts is f32 in both, or bf16 where f32 does not fit into memory.
    """
    if find_spec("transformers") is None:
        raise NotMeasuredError("transformers not found: pip install 'kt-kernel[engine]'")
    weight_format = _format(path, method)
    plain = weight_format == "bf16"
    dtype = _dtype(path, plain)
    windows = _windows(path, tokens, trust_remote_code)
    reference = None if plain else "BF16"
    right = perplexity.log_probabilities(_load(path, reference, dtype, threads, trust_remote_code), windows)
    gc.collect()  # modules hold each other: without it both models are in memory
    found = perplexity.log_probabilities(_load(path, method, dtype, threads, trust_remote_code), windows)
    limit = divergence_limit(weight_format)
    apart = perplexity.distance(right, found)
    failures = []
    if not apart["divergence"] <= limit:
        failures.append(f"divergence {apart['divergence']:.3g} from bf16; the limit of {weight_format} is {limit:.2g}")
    return {
        "format": weight_format,
        "tokens": sum(window.shape[1] - 1 for window in windows),
        "dtype": dtype,
        "reference": "transformers" if plain else "BF16",
        "reference_perplexity": _finite(exp(min(perplexity.loss(windows, right), 700.0))),
        "perplexity": _finite(exp(min(perplexity.loss(windows, found), 700.0))),
        "divergence": _finite(apart["divergence"]),
        "same_token": apart["same_token"],
        "limit": limit,
        "failures": failures,
    }


def needed_bytes(path: Path, expert_bytes: int, other_bytes: int) -> int:
    """Memory of the model with so many bytes for a weight of experts, and of everything else."""
    config = model_config(path)
    experts = len(config.moe_layers) * config.num_experts * 3 * config.hidden_size * config.moe_intermediate_size
    with TensorFiles(path) as files:
        # Those of routed experts are below a name that is "experts"; shared ones are not.
        others = sum(prod(files.entry(name).shape) for name in files if not re.search(r"\.experts\b", name))
    return experts * expert_bytes + others * other_bytes + _SPARE_BYTES


def _dtype(path: Path, plain: bool) -> str:
    """Of everything but the experts, which have it too with plain transformers and bf16 on our kernels."""
    available = available_bytes()
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        needed = needed_bytes(path, size if plain else 2, size)
        if needed <= available:
            return dtype
    raise NotMeasuredError(
        f"in bf16 the model needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free"
    )


def _format(path: Path, method: str) -> str:
    if holds_only_gguf(path):
        raise NotMeasuredError("GGUF files hold no model that transformers reads")
    config = model_config(path)
    layer, sizes = config.moe_layers[0], (config.hidden_size, config.moe_intermediate_size)
    if locate(path, layer)[0] is not Kind.CHECKPOINT:
        raise NotMeasuredError("converted weights are experts alone: name the model that they were made of")
    if method == "auto":
        method = find_method(path, layer, *sizes)
    if method == LLAMAFILE:
        raise NotMeasuredError(f"method {LLAMAFILE} needs GGUF files")
    return choose_format(method, path, layer, *sizes).format


def _windows(path: Path, tokens: int, trust_remote_code: bool) -> list:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise NotMeasuredError(f"no tokenizer: {' '.join(str(error).split())}") from None
    windows = perplexity.windows_of(tokenizer, tokens)
    if windows[0].shape[1] < 2:  # transformers makes an empty one up where there are no files
        raise NotMeasuredError(f"no tokenizer: {path} has no files of one")
    return windows


def _load(path: Path, method: str | None, dtype: str, threads: int | None, trust_remote_code: bool):
    """With experts on our kernels, or with method None on transformers'."""
    import torch
    from transformers import AutoModelForCausalLM

    from kt_kernel.hf import KTConfig

    config = {} if method is None else {"quantization_config": KTConfig(method=method, threads=threads)}
    try:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=trust_remote_code, **config
        ).eval()
    except (ImportError, OSError, ValueError) as error:
        raise NotMeasuredError(f"transformers does not load it: {' '.join(str(error).split())}") from None


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if value == value and abs(value) != float("inf") else None
