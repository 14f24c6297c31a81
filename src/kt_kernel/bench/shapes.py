"""The MoE layers that are measured, and how many of their experts fit into memory."""

from dataclasses import dataclass, replace

from kt_kernel.bench import gguf_blocks
from kt_kernel.bench.errors import BenchError


@dataclass(frozen=True)
class Shape:
    """One MoE layer: ``experts`` held, ``top_k`` of them for each token, matrices of ``hidden`` x ``intermediate``."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def weights_per_expert(self) -> int:
        return 3 * self.hidden * self.intermediate

    def flops(self, tokens: int) -> int:
        """Operations of one forward: a multiply-add of every weight that a token meets counts 2."""
        return 2 * self.weights_per_expert * self.top_k * tokens


# dsv3 holds 32 of its 256 experts: what one NUMA node of a big machine would hold for a few layers, and enough that a
# token never finds its experts in a cache.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("dsv3", 32, 8, 7168, 2048),
        Shape("qwen3-30b", 128, 8, 2048, 768),
        Shape("mixtral", 8, 2, 4096, 14336),
        Shape("gpt-oss", 32, 4, 2880, 2880),
    )
}

# Made from bf16 weights, as checkpoints have them, and as GGUF files do.
QUANTISED = ("bf16", "int8", "int4", "int4g")
GROUP_SIZES = {"fp8": 128, "fp8c": 0, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "rawint4": 32, "int4z": 128}
GGUF_TYPES = tuple(gguf_blocks.BLOCKS)
FORMATS = (*QUANTISED, *GROUP_SIZES, *GGUF_TYPES)

# Upper bounds with scales and padding, only for planning memory; figures use what the layer reports.
_PLANNED_BYTES_PER_WEIGHT = {"bf16": 2.1, "int8": 1.1, "int4": 0.6, "int4g": 0.7}
_PLANNED_BYTES_PER_WEIGHT |= {name: 1.2 if "fp8" in name else 0.7 for name in GROUP_SIZES}
_PLANNED_BYTES_PER_WEIGHT |= {name: 1.1 * gguf_blocks.bytes_per_weight(name) for name in GGUF_TYPES}


def parse(text: str) -> Shape:
    """A name of SHAPES, or E,K,H,I. Raises ValueError with the legal values."""
    if text in SHAPES:
        return SHAPES[text]
    legal = f"{', '.join(SHAPES)}, or E,K,H,I (experts, top-k, hidden, intermediate)"
    try:
        experts, top_k, hidden, intermediate = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"'{text}' is not one of {legal}") from None
    if not (0 < top_k <= experts and hidden > 0 and intermediate > 0):
        raise ValueError(f"'{text}' needs 1 <= K <= E and H, I >= 1; legal: {legal}")
    return Shape(f"{experts}x{top_k}x{hidden}x{intermediate}", experts, top_k, hidden, intermediate)


def planned_bytes(shape: Shape, weight_format: str) -> int:
    """Memory for one packed expert, rounded up."""
    return int(shape.weights_per_expert * _PLANNED_BYTES_PER_WEIGHT[weight_format])


def fit(shape: Shape, bytes_per_expert: int, available: int) -> Shape:
    """The shape with as many experts as fit into half of the available memory: the other half is the machine's."""
    experts = min(shape.experts, available // 2 // bytes_per_expert)
    if experts < shape.top_k:
        raise BenchError(
            f"{shape.name} needs {shape.top_k * bytes_per_expert / 1e9:.1f} GB for the experts of one token and may "
            f"use {available / 2e9:.1f} GB (half of what is free); choose a smaller --shape or a smaller format"
        )
    return replace(shape, experts=experts)


def layers_beyond_cache(shape: Shape, bytes_per_expert: int, cache_bytes: int, available: int) -> int:
    """How many copies of the layer to go round, so that together they are four times the last-level cache."""
    layer_bytes = max(1, shape.experts * bytes_per_expert)
    wanted = -(-4 * cache_bytes // layer_bytes)
    return max(1, min(wanted, available // 2 // layer_bytes, 16))
