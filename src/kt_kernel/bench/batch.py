"""Inputs of a forward: seeded, so that two processes compute the same function on the same numbers."""

from statistics import NormalDist

import numpy as np

from kt_kernel.bench import gguf_blocks
from kt_kernel.bench.shapes import Shape


class Batch:
    """``tokens`` rows of input, and several routings to go round, so that no call finds its experts in a cache."""

    def __init__(self, shape: Shape, tokens: int, seed: int = 0):
        rng = np.random.default_rng([seed, tokens])
        routings = 16 if tokens <= 16 else 4
        self.tokens = tokens
        self.ids = [_routing(rng, shape, tokens) for _ in range(routings)]
        self.weights = np.full((tokens, shape.top_k), 1 / shape.top_k, np.float32)
        self.input = normal_bf16(rng, (tokens, shape.hidden), 1.0)
        self.output = np.zeros((tokens, shape.hidden), np.uint16)
        # Taken once: numpy needs a microsecond for an address, a tenth of a small forward.
        common = [array.ctypes.data for array in (self.weights, self.input, self.output)]
        self._addresses = [(ids.ctypes.data, *common) for ids in self.ids]

    def addresses(self, call: int) -> tuple[int, int, int, int]:
        """Where ids, weights, input and output of this call are."""
        return self._addresses[call % len(self._addresses)]

    @property
    def unique_experts(self) -> float:
        """Distinct experts that a call reads, mean over the routings."""
        return float(np.mean([np.unique(ids).size for ids in self.ids]))


def expert_weights(shape: Shape, expert: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """gate [I,H], up [I,H], down [H,I] as bf16 bits, scaled so that activations keep their size."""
    rng = np.random.default_rng([seed, 1, expert])
    rows, depth = shape.intermediate, shape.hidden
    return (
        normal_bf16(rng, (rows, depth), depth**-0.5),
        normal_bf16(rng, (rows, depth), depth**-0.5),
        normal_bf16(rng, (depth, rows), rows**-0.5),
    )


def encoded_weights(
    shape: Shape, weight_format: str, expert: int, seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(codes, scales) of gate, up and down as a checkpoint has them, of about the deviation of ``expert_weights``.

    fp8: e4m3 [N, K], f32 scales of blocks of 128 x 128. rawint4: nibbles [N, K / 2], bf16 scales of 32 k.
    """
    rng = np.random.default_rng([seed, 2, expert])
    made = []
    for rows, depth in ((shape.intermediate, shape.hidden),) * 2 + ((shape.hidden, shape.intermediate),):
        if weight_format == "fp8":
            codes = rng.integers(0, 256, (rows, depth), dtype=np.uint8) & np.uint8(0xBF)  # below 2: no NaN
            scales = np.full((-(-rows // 128), -(-depth // 128)), depth**-0.5 / 0.6, np.float32)
        else:
            codes = rng.integers(0, 256, (rows, depth // 2), dtype=np.uint8)
            scales = np.full((rows, depth // 32), depth**-0.5 / 4.6, np.float32).view(np.uint32) >> 16
            scales = scales.astype(np.uint16)
        made.append((codes, scales))
    return made


def gguf_weights(
    shape: Shape, weight_format: str, expert: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """gate, up and down as a GGUF file has them, rows of bytes, of about the deviation of ``expert_weights``."""
    rng = np.random.default_rng([seed, 3, expert])
    rows, depth = shape.intermediate, shape.hidden
    return (
        gguf_blocks.random_rows(rng, weight_format, rows, depth, depth**-0.5),
        gguf_blocks.random_rows(rng, weight_format, rows, depth, depth**-0.5),
        gguf_blocks.random_rows(rng, weight_format, depth, rows, rows**-0.5),
    )


def normal_bf16(rng: np.random.Generator, size: tuple[int, ...], sigma: float) -> np.ndarray:
    """Normal values as bf16 bits, from a table of quantiles: 10 times faster than drawing and rounding floats."""
    table = ((_QUANTILES * np.float32(sigma)).view(np.uint32) >> 16).astype(np.uint16)
    return table[rng.integers(0, 1 << 16, size, dtype=np.uint16)]


def to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def from_float(values: np.ndarray) -> np.ndarray:
    """bf16 bits of finite values, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _routing(rng: np.random.Generator, shape: Shape, tokens: int) -> np.ndarray:
    """Uniform: top_k different experts for each token."""
    order = rng.random((tokens, shape.experts), dtype=np.float32).argpartition(shape.top_k - 1, axis=1)
    return np.ascontiguousarray(order[:, : shape.top_k], dtype=np.int64)


def _quantiles() -> np.ndarray:
    normal, count = NormalDist(), 1 << 12
    table = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)], np.float32)
    return np.resize(table, 1 << 16)


_QUANTILES = _quantiles()
