"""Layers with random experts, and the plumbing that tests of layers share; what they should compute is
kt_kernel.verify.reference.
"""

import ctypes
from functools import lru_cache

import checkpoint_codes
import numpy as np

from kt_kernel import _core
from kt_kernel.verify.reference import (
    ACT_ERROR,
    SILU,
    Activation,
    Biases,
    Shape,
    Weights,
    moe,
    moe_with_bound,
    relative_error,
)

__all__ = [
    "ACT_ERROR",
    "SILU",
    "Activation",
    "Biases",
    "Case",
    "Shape",
    "Weights",
    "address",
    "from_bf16",
    "moe",
    "moe_with_bound",
    "random_batch",
    "random_biases",
    "random_expert",
    "relative_error",
    "shared_pool",
    "to_bf16",
]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Case:
    """A layer with random experts, and what its weights are before and after packing."""

    def __init__(
        self,
        shape: Shape,
        weight_format="bf16",
        threads=(1,),
        max_tokens=64,
        variant=None,
        seed=0,
        pool=None,
        activation=SILU,
        load=None,
        biases=None,
    ):
        """With `biases`, one of each expert, the layer has them."""
        self.shape = shape
        self.pool = pool or shared_pool(threads)
        self.layer = _core.MoELayer(
            self.pool,
            format=weight_format,
            num_experts=shape.experts,
            top_k=shape.top_k,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            max_tokens=max_tokens,
            variant=variant,
            swiglu_limit=activation.limit,
            swiglu_alpha=activation.alpha,
            activation=activation.name,
            biases=biases is not None,
            group_size=checkpoint_codes.group_size(weight_format),
        )
        self.original = [random_expert(shape, seed, expert) for expert in range(shape.experts)]
        for expert in range(shape.experts) if load is None else load:
            if weight_format in checkpoint_codes.KEPT:
                self.layer.load_encoded(expert, *_encoded_expert(shape, seed, expert, weight_format))
            else:
                self.load(expert, self.original[expert])
            if biases is not None:
                self.layer.load_biases(expert, *biases[expert])

    def load(self, expert: int, weights: Weights) -> None:
        """bf16 bits, whatever the format."""
        checkpoint_codes.load(self.layer, expert, *weights)

    def decoded(self) -> list[Weights]:
        return [self.layer.decode_expert(expert) for expert in range(self.shape.experts)]

    def run(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, onto=None, addend=None, skip=None):
        """bf16 bits in, bf16 bits out; added to bits where given: in their own memory (onto) or elsewhere (addend)."""
        ids = np.ascontiguousarray(ids, np.int32 if ids.dtype == np.int32 else np.int64)
        weights = np.ascontiguousarray(weights, np.float32)
        assert ids.shape == weights.shape == (len(x), self.shape.top_k)
        assert x.shape == (len(x), self.shape.hidden)
        assert x.dtype == np.uint16
        assert x.flags.c_contiguous
        # Full of NaN, so that whatever is not written shows.
        out = np.full(x.shape, 0x7FC0, np.uint16) if onto is None else onto.copy()
        addresses = [array.ctypes.data for array in (ids, weights, x, out)]
        self.layer.forward(
            len(x),
            *addresses,
            incremental=onto is not None,
            addend=address(addend),
            id_bytes=ids.itemsize,
            skip=address(skip),
        )
        return out

    def sums(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The output, and what rounding took from the f32 sum behind it: together they show 16 bits of the sum."""
        out = self.run(x, ids, weights)
        return out, self.run(x, ids, weights, onto=out ^ np.uint16(0x8000))

    def mask(self) -> np.ndarray:
        """The layer's mask, in place; valid as long as the layer."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.shape.experts).from_address(self.layer.mask_address))


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


_pools: dict[tuple[int, ...], "_core.Pool"] = {}


def shared_pool(threads: tuple[int, ...]) -> "_core.Pool":
    """One pool per split: `threads[i]` workers on node i. Workers park at once, as many pools share few cores."""
    if threads not in _pools:
        _pools[threads] = _core.Pool(list(threads), spin_us=0)
    return _pools[threads]


def random_expert(shape: Shape, seed: int, expert: int) -> Weights:
    rng = np.random.default_rng([seed, expert])
    rows, depth = shape.intermediate, shape.hidden
    sizes = ((rows, depth), (rows, depth), (depth, rows))
    return tuple(to_bf16(rng.standard_normal(size, np.float32) / size[1] ** 0.5) for size in sizes)


@lru_cache(maxsize=1024)  # making codes takes longer than most tests
def _encoded_expert(shape: Shape, seed: int, expert: int, weight_format: str) -> tuple:
    matrices = map(from_bf16, random_expert(shape, seed, expert))
    return tuple(checkpoint_codes.encode(weight_format, matrix) for matrix in matrices)


def random_biases(shape: Shape, seed: int = 0) -> list[Biases]:
    rng = np.random.default_rng([seed, 11])
    sizes = (shape.intermediate, shape.intermediate, shape.hidden)
    return [tuple(rng.standard_normal(size, np.float32) for size in sizes) for _ in range(shape.experts)]


def random_batch(shape: Shape, tokens: int, seed=0) -> Weights:
    """Input as bf16 bits, ids (different within a token where possible), weights of either sign."""
    rng = np.random.default_rng([seed, tokens, 7])
    x = to_bf16(rng.standard_normal((tokens, shape.hidden), np.float32))
    ids = rng.permuted(np.tile(np.arange(max(shape.experts, shape.top_k)), (tokens, 1)), axis=1)[:, : shape.top_k]
    return x, ids % shape.experts, rng.standard_normal((tokens, shape.top_k)).astype(np.float32)
