"""What a layer should compute, in fp64, and the plumbing that tests of layers share.

out[t] = sum_j weights[t, j] * down_e @ activation(gate_e @ x[t], up_e @ x[t]),  e = ids[t, j],
with biases added to each of the three products where experts have them.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import checkpoint_codes
import numpy as np

from kt_kernel import _core

Weights = tuple[np.ndarray | None, np.ndarray, np.ndarray]  # gate [I, H], None without gates; up [I, H], down [H, I]
Biases = tuple[np.ndarray, np.ndarray, np.ndarray]  # [I], [I], [H]


class Activation(NamedTuple):
    """0 turns a parameter off. Without alpha silu(g) * u, with it g * sigmoid(alpha g) * (u + 1)."""

    limit: float = 0.0
    alpha: float = 0.0
    name: str | None = None  # None: as alpha says

    def factors(self, g: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What becomes of gate and up before they are multiplied; neither has a slope above 1.13."""
        if self.limit:
            both_sides = self.alpha and self.name != "swigluoai"
            g = np.clip(g, -self.limit if both_sides else None, self.limit)
            u = np.clip(u, -self.limit, self.limit)
        if self.name == "relu2":
            return np.maximum(u, 0), np.maximum(u, 0)
        if self.name == "gelu_tanh":
            return g * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))) / 2, u
        with np.errstate(over="ignore"):  # 1 / inf is right
            return g / (1 + np.exp(-(self.alpha or 1.0) * g)), u + 1 if self.alpha else u


SILU = Activation()


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """mean |out - ref| / mean |ref|; of zeros, the largest |out|."""
    scale = np.abs(reference).mean() if reference.size else 0.0
    if scale == 0:
        return float(np.abs(out).max(initial=0))
    return float(np.abs(out - reference).mean() / scale)


# Largest error of a quantised activation, in units of the largest magnitude of its row: half a step.
# "rounded": weights rounded to bf16, 2^-9 of each product; the largest of a normal row is thrice the mean.
ACT_ERROR = {"bf16": 0.0, "rounded": 2.0**-10, "s16": 0.5 / 32767, "s8": 0.5 / 127}
_BF16 = 2.0**-8  # twice the relative rounding error
_F32 = 2.0**-15  # of sums of a few hundred products and of exp
# The errors of a sum's terms are independent and add up like the sides of a right angle, so this makes 8 or more
# standard deviations. The largest error in 2,500 random layers was half of it.
_MARGIN = 5.0


def add_errors(errors: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    return np.sqrt(errors**2 @ (matrix**2).T)


def ffn(
    weights: Weights, x: np.ndarray, act_error: float, activation: Activation, biases: Biases = (0.0, 0.0, 0.0)
) -> tuple[np.ndarray, np.ndarray]:
    """The expert's output, and how far a right kernel may be from it."""
    gate, up, down = (
        matrix.astype(np.float64) for matrix in (weights[1] if weights[0] is None else weights[0], *weights[1:])
    )
    dx = act_error * np.abs(x).max(axis=1, keepdims=True, initial=0) + _F32 * np.abs(x)
    g, u = x @ gate.T + biases[0], x @ up.T + biases[1]
    dg, du = add_errors(dx, gate), add_errors(dx, up)
    g, u = activation.factors(g, u)
    h = g * u
    dh = 1.13 * dg * (np.abs(u) + du) + np.abs(g) * du + _BF16 * np.abs(h)
    dh += act_error * (np.abs(h) + dh).max(axis=1, keepdims=True, initial=0) + _F32 * np.abs(h)
    return h @ down.T + biases[2], _MARGIN * add_errors(dh, down)


def moe_with_bound(
    experts, x, ids, weights, mask=(), act_error=0.0, activation=SILU, biases=None
) -> tuple[np.ndarray, np.ndarray]:
    """fp64 [T, H] of float x, and the largest error of each element. Ids out of range or masked are skipped."""
    out, bound = np.zeros(x.shape), np.zeros(x.shape)
    for expert, matrices in enumerate(experts):
        tokens, slots = np.nonzero(ids == expert)
        if tokens.size == 0 or (len(mask) and mask[expert]):
            continue
        added = biases[expert] if biases else (0.0, 0.0, 0.0)
        y, dy = ffn(matrices, x[tokens].astype(np.float64), act_error, activation, added)
        w = weights[tokens, slots].astype(np.float64)[:, None]
        np.add.at(out, tokens, w * y)
        np.add.at(bound, tokens, np.abs(w) * (dy + _F32 * np.abs(y)))
    return out, bound + _BF16 * (np.abs(out) + bound)


def moe(
    experts: list[Weights], x: np.ndarray, ids: np.ndarray, weights: np.ndarray, activation=SILU, biases=None
) -> np.ndarray:
    return moe_with_bound(experts, x, ids, weights, activation=activation, biases=biases)[0]


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    intermediate: int


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
