"""Weights in the formats of checkpoints, made by numpy: codes and scales, and what they mean.

Scales are those that put the largest weight of a group on the largest code, rounded to what the format has; codes are
the nearest ones.
"""

from dataclasses import dataclass

import numpy as np

from kt_kernel import _core

# format -> group size; 0: it has no groups
GROUP_SIZES = {"fp8": 128, "fp8c": 0, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "rawint4": 32, "int4z": 64}
_ROWS_OF_BLOCK = 32  # of fp8, so that a panel of 16 rows has one block and small layers have several


def _magnitudes(exponent_bits: int, fraction_bits: int, bias: int) -> np.ndarray:
    """Of the codes of a float without a sign, ascending; exponent 0 has subnormals."""
    codes = np.arange(1 << (exponent_bits + fraction_bits))
    exponent, fraction = codes >> fraction_bits, (codes & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


_E4M3 = _magnitudes(4, 3, 7)[:127]  # the last code is NaN
_E2M1 = _magnitudes(2, 1, 1)


@dataclass(frozen=True)
class Encoded:
    """A matrix as a checkpoint has it, and its weights in f64."""

    matrix: "_core.EncodedMatrix"
    meaning: np.ndarray


def encode(weight_format: str, weights: np.ndarray, group: int | None = None) -> Encoded:
    group = GROUP_SIZES[weight_format] if group is None else group
    return _ENCODERS[weight_format](weights, group)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return padded[:, ::2] | padded[:, 1::2] << 4


def _fp8(weights: np.ndarray, group: int) -> Encoded:
    scales = (_largest(weights, _ROWS_OF_BLOCK, group) / 448).astype(np.float32)
    spread = _spread(scales, weights.shape, _ROWS_OF_BLOCK, group)
    codes, values = _floats(weights / spread, _E4M3, 0x80)
    return Encoded(_core.EncodedMatrix(codes, scales, block_rows=_ROWS_OF_BLOCK), values * spread)


def _fp8c(weights: np.ndarray, group: int) -> Encoded:
    rows = (_largest(weights, 1, weights.shape[1])[:, 0] / 448).astype(np.float32)
    codes, values = _floats(weights / rows[:, None], _E4M3, 0x80)
    return Encoded(_core.EncodedMatrix(codes, rows=rows), values * rows[:, None])


def _mx(weights: np.ndarray, group: int, table: np.ndarray, sign: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    exponent = np.ceil(np.log2(_largest(weights, 1, group) / table[-1]))
    spread = _spread(2.0**exponent, weights.shape, 1, group)
    codes, values = _floats(weights / spread, table, sign)
    return codes, (127 + exponent).astype(np.uint8), values * spread


def _mxfp8(weights: np.ndarray, group: int) -> Encoded:
    codes, scales, meaning = _mx(weights, group, _E4M3, 0x80)
    return Encoded(_core.EncodedMatrix(codes, scales), meaning)


def _mxfp4(weights: np.ndarray, group: int) -> Encoded:
    codes, scales, meaning = _mx(weights, group, _E2M1, 8)
    return Encoded(_core.EncodedMatrix(pack_nibbles(codes), scales), meaning)


def _nvfp4(weights: np.ndarray, group: int) -> Encoded:
    whole = np.float32(_largest(weights, *weights.shape)[0, 0] / 448 / 6)
    scales = np.maximum(_nearest(_largest(weights, 1, group) / 6 / whole, _E4M3), 1)
    spread = _spread(_E4M3[scales] * whole, weights.shape, 1, group)
    codes, values = _floats(weights / spread, _E2M1, 8)
    return Encoded(_core.EncodedMatrix(pack_nibbles(codes), scales, rows=whole[None]), values * spread)


def _rawint4(weights: np.ndarray, group: int) -> Encoded:
    scales = _largest(weights, 1, group) / 7
    bits = (scales.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    spread = _spread((bits.astype(np.uint32) << 16).view(np.float32), weights.shape, 1, group)
    codes = np.clip(np.rint(weights / spread) + 8, 0, 15).astype(np.uint8)
    return Encoded(_core.EncodedMatrix(pack_nibbles(codes), bits), (codes - 8.0) * spread)


def _int4z(weights: np.ndarray, group: int) -> Encoded:
    scales = (_largest(weights, 1, group) / 6).astype(np.float16)
    n, g = np.indices(scales.shape)
    zeros = (7 + (n + g) % 3).astype(np.uint8)
    spread = _spread(scales.astype(np.float32), weights.shape, 1, group)
    zero = _spread(zeros, weights.shape, 1, group)
    codes = np.clip(np.rint(weights / spread) + zero, 0, 15).astype(np.uint8)
    return Encoded(_core.EncodedMatrix(pack_nibbles(codes), scales, zeros), (codes - zero) * spread)


_ENCODERS = {
    "fp8": _fp8,
    "fp8c": _fp8c,
    "mxfp8": _mxfp8,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "rawint4": _rawint4,
    "int4z": _int4z,
}


def _nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of |values| in an ascending table."""
    upper = np.clip(np.searchsorted(table, np.abs(values)), 1, len(table) - 1)
    return (upper - (np.abs(values) - table[upper - 1] < table[upper] - np.abs(values))).astype(np.uint8)


def _floats(values: np.ndarray, table: np.ndarray, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and the values that they have."""
    codes = _nearest(values, table)
    negative = np.signbit(values)
    return codes | np.where(negative, sign, 0).astype(np.uint8), np.where(negative, -table[codes], table[codes])


def _largest(weights: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """|weights| of blocks; never 0."""
    by_row = np.maximum.reduceat(np.abs(weights), np.arange(0, weights.shape[0], rows), axis=0)
    return np.maximum(np.maximum.reduceat(by_row, np.arange(0, weights.shape[1], columns), axis=1), 1e-6)


def _spread(scales: np.ndarray, shape: tuple[int, ...], rows: int, columns: int) -> np.ndarray:
    """f64, one for each weight."""
    n, k = np.indices(shape)
    return scales[n // rows, k // columns].astype(np.float64)
