"""Random experts of every format, and what their weights are without asking the kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kt_kernel import _core
from kt_kernel.bench import gguf_blocks
from kt_kernel.ggml_types import EXPERT_TYPES
from kt_kernel.verify.codes import GROUP_SIZES, encode
from kt_kernel.verify.limits import GGUF_ONLY
from kt_kernel.verify.reference import Shape, Weights
from kt_kernel.weights.floats import to_bf16, to_f32

# Made from bf16 weights; the others keep the codes that they are given.
QUANTISED = ("bf16", "int8", "int4", "int4g")
# Gate, up and down of one layer in different types, as most GGUF files have them.
MIXED = "q4_k/q4_k/q6_k"

_TYPES = {kind.name: (type_id, kind.block) for type_id, kind in EXPERT_TYPES.items()}


def formats() -> list[str]:
    """All that layers can have."""
    return [*_core.formats(), MIXED]


def block_of(weight_format: str) -> int:
    """Weights of a row come in multiples of this."""
    return max(_TYPES[part][1] if part in GGUF_ONLY else 1 for part in weight_format.split("/"))


@dataclass(frozen=True)
class Expert:
    """`original`: before it was quantised; `exact`: as its codes say. None: only the core can tell."""

    load: Callable[["_core.MoELayer", int], None]
    original: Weights | None
    exact: Weights | None


def random_expert(weight_format: str, shape: Shape, expert: int, seed: int = 0) -> Expert:
    """Normal weights, scaled so that outputs are about as large as inputs."""
    rng = np.random.default_rng([seed, expert])
    sizes = ((shape.intermediate, shape.hidden),) * 2 + ((shape.hidden, shape.intermediate),)
    if weight_format in GROUP_SIZES:
        encoded = [encode(weight_format, _normal(rng, size)) for size in sizes]
        matrices = [one.matrix for one in encoded]
        return Expert(
            lambda layer, slot: layer.load_encoded(slot, *matrices), None, tuple(one.meaning for one in encoded)
        )
    if weight_format in QUANTISED:
        bits = [to_bf16(_normal(rng, size), "weights") for size in sizes]
        original = tuple(map(to_f32, bits))
        exact = original if weight_format == "bf16" else None
        return Expert(lambda layer, slot: layer.load_expert(slot, *bits), original, exact)
    kinds = weight_format.split("/") if "/" in weight_format else [weight_format] * 3
    rows = [_gguf_rows(rng, kind, size) for kind, size in zip(kinds, sizes, strict=True)]
    return Expert(lambda layer, slot: layer.load_gguf(slot, *rows), None, by_package(kinds, rows))


def _normal(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(size, np.float32) / np.float32(size[1] ** 0.5)


def _gguf_rows(rng: np.random.Generator, kind: str, size: tuple[int, int]) -> np.ndarray:
    """uint8 [rows, bytes of a row]. KeyError where a new type has no block yet."""
    if kind == "f32":
        return _normal(rng, size).view(np.uint8)
    if kind == "f16":
        return _normal(rng, size).astype(np.float16).view(np.uint8)
    return gguf_blocks.random_rows(rng, kind, *size, size[1] ** -0.5)


def by_package(kinds: list[str], rows: list[np.ndarray]) -> Weights | None:
    """As the package gguf decodes them; None where it is not installed."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        return None
    return tuple(
        dequantize(data, GGMLQuantizationType(_TYPES[kind][0])) for kind, data in zip(kinds, rows, strict=True)
    )
