"""Random weights in the formats of checkpoints: codes and scales as _core.EncodedMatrix takes them, made by numpy.

Scales are those that put the largest weight of a group on the largest code, rounded to what the format has; codes are
the nearest ones.
"""

import numpy as np
from encoded_weights import E2M1, E4M3

from kt_kernel import _core

# format -> group size of test layers; 0: it has no groups
GROUP_SIZES = {"fp8": 128, "fp8c": 0, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "rawint4": 32, "int4z": 64}
KEPT = list(GROUP_SIZES)
_ROWS_OF_BLOCK = 32  # of fp8, so that a panel of 16 rows has one block and test layers have several


def group_size(weight_format: str) -> int:
    return GROUP_SIZES.get(weight_format, 0)


def _nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of |values| in an ascending table."""
    upper = np.clip(np.searchsorted(table, np.abs(values)), 1, len(table) - 1)
    return (upper - (np.abs(values) - table[upper - 1] < table[upper] - np.abs(values))).astype(np.uint8)


def _signed(values: np.ndarray, table: np.ndarray, sign: int) -> np.ndarray:
    return _nearest(values, table) | np.where(np.signbit(values), sign, 0).astype(np.uint8)


def _largest(weights: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """|weights| of blocks; never 0."""
    by_row = np.maximum.reduceat(np.abs(weights), np.arange(0, weights.shape[0], rows), axis=0)
    return np.maximum(np.maximum.reduceat(by_row, np.arange(0, weights.shape[1], columns), axis=1), 1e-6)


def _over(weights: np.ndarray, scales: np.ndarray, rows: int, columns: int) -> np.ndarray:
    n, k = np.indices(weights.shape)
    return weights / scales[n // rows, k // columns]


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return padded[:, ::2] | padded[:, 1::2] << 4


def encode(weight_format: str, weights: np.ndarray, group: int | None = None) -> "_core.EncodedMatrix":
    group = group_size(weight_format) if group is None else group
    e4m3, e2m1 = E4M3[:127], E2M1[:8]
    if weight_format == "fp8":
        scales = (_largest(weights, _ROWS_OF_BLOCK, group) / 448).astype(np.float32)
        codes = _signed(_over(weights, scales, _ROWS_OF_BLOCK, group), e4m3, 0x80)
        return _core.EncodedMatrix(codes, scales, block_rows=_ROWS_OF_BLOCK)
    if weight_format == "fp8c":
        rows = (_largest(weights, 1, weights.shape[1])[:, 0] / 448).astype(np.float32)
        return _core.EncodedMatrix(_signed(weights / rows[:, None], e4m3, 0x80), rows=rows)
    if weight_format in ("mxfp8", "mxfp4"):
        table, sign = (e4m3, 0x80) if weight_format == "mxfp8" else (e2m1, 8)
        exponent = np.ceil(np.log2(_largest(weights, 1, group) / table[-1]))
        codes = _signed(_over(weights, 2.0**exponent, 1, group), table, sign)
        codes = codes if weight_format == "mxfp8" else pack_nibbles(codes)
        return _core.EncodedMatrix(codes, (127 + exponent).astype(np.uint8))
    if weight_format == "nvfp4":
        whole = np.float32(_largest(weights, *weights.shape)[0, 0] / 448 / 6)
        scales = np.maximum(_nearest(_largest(weights, 1, group) / 6 / whole, e4m3), 1)
        codes = _signed(_over(weights, E4M3[scales] * whole, 1, group), e2m1, 8)
        return _core.EncodedMatrix(pack_nibbles(codes), scales, rows=whole[None])
    if weight_format == "rawint4":
        scales = _largest(weights, 1, group) / 7
        bits = (scales.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        f32 = (bits.astype(np.uint32) << 16).view(np.float32)
        codes = np.clip(np.rint(_over(weights, f32, 1, group)) + 8, 0, 15).astype(np.uint8)
        return _core.EncodedMatrix(pack_nibbles(codes), bits)
    scales = (_largest(weights, 1, group) / 6).astype(np.float16)
    n, g = np.indices(scales.shape)
    zeros = (7 + (n + g) % 3).astype(np.uint8)
    codes = (
        np.rint(_over(weights, scales.astype(np.float32), 1, group)) + zeros[:, np.arange(weights.shape[1]) // group]
    )
    return _core.EncodedMatrix(pack_nibbles(np.clip(codes, 0, 15).astype(np.uint8)), scales, zeros)


def load(layer: "_core.MoELayer", expert: int, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> None:
    """bf16 bits into a layer of any format."""
    if layer.format not in GROUP_SIZES:
        layer.load_expert(expert, gate, up, down)
        return
    weights = [(bits.astype(np.uint32) << 16).view(np.float32) for bits in (gate, up, down)]
    group = layer.group_size
    layer.load_encoded(expert, *(encode(layer.format, matrix, group) for matrix in weights))
