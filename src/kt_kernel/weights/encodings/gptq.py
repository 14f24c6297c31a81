"""GPTQ: weight[n, k] = (nibble k of column n - zero[g, n]) * scales[g, n], g = g_idx[k] or k // group.

qweight I32 [K / 8, N], k in ascending bits; scales [G, N] in f16, bf16 or f32; qzeros I32 [G, N / 8], n in ascending
bits, zero = nibble + 1 (without them 8, the symmetric case, which is stored as 7); g_idx I32 or I64 [K] ("act-order").
"""

import numpy as np

from kt_kernel.weights.encodings.groups import group_size
from kt_kernel.weights.encodings.integers import LARGEST, decode_groups, unpacked
from kt_kernel.weights.encodings.stored import FLOATS, Encoding, Parts, Shape, Stored, float_scales

SYMMETRIC = 8


def shape(parts: Parts) -> Shape:
    depth, rows = parts["qweight"].array.shape
    return rows, 8 * depth


def _zeros(stored: Stored, groups: int, rows: int) -> np.ndarray | int:
    stored.check_shape((groups, rows // 8))
    nibbles = unpacked(stored.array.view(np.uint8))
    if (nibbles == SYMMETRIC - 1).all():
        return SYMMETRIC
    if (nibbles == SYMMETRIC).all():
        raise ValueError(
            f"{stored.where} holds 8 everywhere; needed are zero points less one (7 if symmetric): this is GPTQ of "
            "version 2, which stores them as they are; save the model in the format 'gptq'"
        )
    return np.ascontiguousarray(nibbles.T + 1)


def _groups(parts: Parts, columns: int, groups: int) -> np.ndarray:
    if "g_idx" not in parts:
        return np.arange(columns) // group_size(columns, groups, parts["scales"], 0)
    stored = parts["g_idx"]
    stored.check_shape((columns,))
    index = stored.array
    if index.min(initial=0) < 0 or index.max(initial=0) >= groups:
        raise ValueError(f"{stored.where} has groups {index.min()}..{index.max()}; needed are 0..{groups - 1}")
    return index.astype(np.intp)


def decode(parts: Parts, shape: Shape) -> np.ndarray:
    codes, scale = parts["qweight"], parts["scales"]
    rows, columns = shape
    if columns % 8 or ("qzeros" in parts and rows % 8):
        raise codes.wrong(f"a matrix whose sides are multiples of 8, not {list(shape)}")
    codes.check_shape((columns // 8, rows))
    if scale.array.ndim != 2 or scale.array.shape[1] != rows:
        raise scale.wrong(f"[groups of the {columns} columns, {rows}]")
    groups = scale.array.shape[0]
    group_of = _groups(parts, columns, groups)
    zeros = _zeros(parts["qzeros"], groups, rows) if "qzeros" in parts else SYMMETRIC
    scales = np.ascontiguousarray(float_scales(scale, LARGEST).T)
    data = np.ascontiguousarray(codes.array.T).view(np.uint8)  # eight weights at a time, so turning it is cheap
    return decode_groups(lambda part: unpacked(data[part]), shape, scales, zeros, group_of)


def fits(shapes: dict[str, tuple[int, ...]]) -> bool:
    return len(shapes["qweight"]) == len(shapes["scales"]) == 2 and shapes["qweight"][1] == shapes["scales"][1]


GPTQ = Encoding(
    "GPTQ",
    {"qweight": ("I32",), "scales": FLOATS},
    shape,
    decode,
    optional={"qzeros": ("I32",), "g_idx": ("I32", "I64")},
    fits=fits,
)
