"""The table of tolerances: one entry per format, and what the kernels of a variant read as activations.

Errors are mean |out - ref| / mean |ref|, on normal weights and inputs, against fp64 of
  decoded   the weights as packed: the error of the kernels and of quantised activations;
  original  the bf16 weights: everything, the format's own error included.
The released package allows itself 0.05 (int8) and 0.35 (int4) against the original weights.
"""

from typing import NamedTuple

from kt_kernel.ggml_types import EXPERT_FORMATS
from kt_kernel.methods import KEPT_FORMATS


class Limit(NamedTuple):
    decoded: float
    original: float


# (format, kind of activations) -> limits
LIMITS = {
    ("bf16", "bf16"): Limit(0.0028, 0.0028),
    ("int8", "s16"): Limit(0.0030, 0.018),
    ("int8", "s8"): Limit(0.022, 0.028),
    ("int4", "s8"): Limit(0.022, 0.25),
    ("int4g", "s8"): Limit(0.022, 0.182),
    # As checkpoints have them; `original` is what the encoder of codes.py loses.
    ("fp8", "bf16"): Limit(0.0030, 0.050),
    ("fp8", "rounded"): Limit(0.0042, 0.050),
    ("fp8c", "bf16"): Limit(0.0030, 0.050),
    ("fp8c", "rounded"): Limit(0.0042, 0.050),
    ("mxfp8", "bf16"): Limit(0.0030, 0.050),
    ("mxfp4", "bf16"): Limit(0.0030, 0.215),
    ("nvfp4", "bf16"): Limit(0.0030, 0.195),
    ("nvfp4", "rounded"): Limit(0.0042, 0.195),
    ("rawint4", "bf16"): Limit(0.0030, 0.180),
    ("rawint4", "rounded"): Limit(0.0042, 0.180),
    ("int4z", "bf16"): Limit(0.0030, 0.235),
    ("int4z", "rounded"): Limit(0.0042, 0.235),
}

# Variants without vpdpbusd widen int8 weights to 16 bits, and give the activations 16 as well.
_INT8 = {
    "amx": "s8",
    "avx512_bf16": "s8",
    "avx512_vbmi": "s8",
    "avx512_vnni": "s8",
    "avx512_base": "s16",
    "avx2": "s16",
    "emu_amx": "s8",
    "emu_avx512_bf16": "s8",
    "emu_avx512_vnni": "s8",
    "emu_avx512_base": "s16",
    "emu": "s16",
}

# Products of bf16, which blocks of rows go through: weights with scales that are no power of two are rounded to bf16
# there, activations stay as they are.
_BF16_PRODUCTS = ("amx", "avx512_bf16", "emu_amx", "emu_avx512_bf16")
_POWERS_OF_TWO = ("mxfp8", "mxfp4")

# From 5 rows on the quantised types of GGUF read 8 bits; on tiles up to 24 rows.
GGUF_ONLY = EXPERT_FORMATS - {"bf16", "mxfp4"}
_GGUF_FLOATS = ("f32", "f16")


def act_kind(weight_format: str, variant: str) -> str:
    """KeyError where a new format or variant has no line here yet."""
    if weight_format in _GGUF_FLOATS:
        return "rounded" if variant in _BF16_PRODUCTS else "bf16"
    if weight_format in GGUF_ONLY:
        return "s8"
    if weight_format in KEPT_FORMATS:
        return "rounded" if variant in _BF16_PRODUCTS and weight_format not in _POWERS_OF_TWO else "bf16"
    return {"bf16": "bf16", "int8": _INT8[variant], "int4": "s8", "int4g": "s8"}[weight_format]


# Relative errors of kernels by kind of activations, of any format; see LIMITS for where they come from.
KERNEL_ERROR = {"bf16": 0.0030, "rounded": 0.0042, "s16": 0.0030, "s8": 0.022}

# Weights of models have longer tails than normal ones, and lose more when they are quantised.
_TAILS = 1.5
# What keeps codes is held against their weights in bf16, which is one rounding more.
_KEPT = 2.0


def layer_limit(weight_format: str, variant: str) -> float:
    """Relative error of a layer of a model against the weights of its checkpoint."""
    if weight_format in ("int8", "int4", "int4g"):
        return _TAILS * LIMITS[weight_format, act_kind(weight_format, variant)].original
    return _KEPT * max(KERNEL_ERROR[act_kind(part, variant)] for part in weight_format.split("/"))


# Divergence of a model from itself in bf16, in nats for each token. About thrice what the demo model has (see
# docs/quality.md), which suffers more than larger ones; wrong weights give 1 and more.
_DIVERGENCE = {"int8": 0.02, "int4g": 0.6, "int4": 1.3}


def divergence_limit(weight_format: str) -> float:
    """What keeps the weights may differ by rounding alone."""
    return _DIVERGENCE.get(weight_format, 0.01)
