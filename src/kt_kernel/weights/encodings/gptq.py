"""GPTQ: weight[n, k] = (nibble k of column n - zero[g, n]) * scales[g, n], g = g_idx[k] or k // group.

qweight I32 [K / 8, N], k in ascending bits; scales [G, N] in f16, bf16 or f32; qzeros I32 [G, N / 8], n in ascending
bits; g_idx I32 or I64 [K] ("act-order": layers keep the columns sorted by group). zero = nibble + 1, or in version 2
the nibble; without qzeros 8, the symmetric case. Only config.json tells the version.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from kt_kernel.methods import DECODING
from kt_kernel.weights.encodings.groups import group_size, shared_size
from kt_kernel.weights.encodings.integers import LARGEST, decode_groups, unpacked
from kt_kernel.weights.encodings.native import Target, check_groups, int4_matrix, int4_scales
from kt_kernel.weights.encodings.stored import FLOATS, Encoding, Parts, Shape, Stored, float_scales

SYMMETRIC = 8
VERSION_2 = "gptq_v2"  # in config.json


def shape(parts: Parts) -> Shape:
    depth, rows = parts["qweight"].array.shape
    return rows, 8 * depth


def _check(parts: Parts, shape: Shape) -> tuple[Stored, Stored]:
    codes, scale = parts["qweight"], parts["scales"]
    rows, columns = shape
    if columns % 8 or ("qzeros" in parts and rows % 8):
        raise codes.wrong(f"a matrix whose sides are multiples of 8, not {list(shape)}")
    codes.check_shape((columns // 8, rows))
    if scale.array.ndim != 2 or scale.array.shape[1] != rows:
        raise scale.wrong(f"[groups of the {columns} columns, {rows}]")
    return codes, scale


def _zeros(parts: Parts, groups: int, rows: int, less: int) -> np.ndarray | None:
    """Bytes [N, G]; None if all are 8. `less` was taken from them before they were stored."""
    if "qzeros" not in parts:
        return None
    stored = parts["qzeros"]
    stored.check_shape((groups, rows // 8))
    packed = stored.array.view(np.uint32)
    if (packed == (SYMMETRIC - less) * 0x11111111).all():
        return None
    if less and (packed == SYMMETRIC * 0x11111111).all():
        raise ValueError(
            f"{stored.where} holds 8 everywhere; needed are zero points less one (7 if symmetric): this is GPTQ of "
            f"version 2, which stores them as they are; config.json must say so (checkpoint_format {VERSION_2!r} in "
            "quantization_config), or save the model in the format 'gptq'"
        )
    out = np.empty((rows // 8, 8, groups), np.uint8)
    for n in range(8):
        out[:, n] = ((packed >> np.uint32(4 * n)) & np.uint32(15)).T
    out += np.uint8(less)
    return out.reshape(rows, groups)


def _groups(parts: Parts, columns: int, groups: int) -> np.ndarray | None:
    """The group of each column as g_idx has it; None if there is none."""
    if "g_idx" not in parts:
        return None
    stored = parts["g_idx"]
    stored.check_shape((columns,))
    index = stored.array
    if index.min(initial=0) < 0 or index.max(initial=0) >= groups:
        raise ValueError(f"{stored.where} has groups {index.min()}..{index.max()}; needed are 0..{groups - 1}")
    return index.astype(np.intp)


def decode(parts: Parts, shape: Shape, less: int) -> np.ndarray:
    codes, scale = _check(parts, shape)
    rows, columns = shape
    groups = scale.array.shape[0]
    group_of = _groups(parts, columns, groups)
    if group_of is None:
        group_of = np.arange(columns) // group_size(columns, groups, scale, 0)
    zeros = _zeros(parts, groups, rows, less)
    zeros = SYMMETRIC if zeros is None else zeros.astype(np.float32)
    scales = np.ascontiguousarray(float_scales(scale, LARGEST).T)
    data = np.ascontiguousarray(codes.array.T).view(np.uint8)  # eight weights at a time, so turning it is cheap
    return decode_groups(lambda part: unpacked(data[part]), shape, scales, zeros, group_of)


def order(parts: Parts, shape: Shape) -> np.ndarray | None:
    """The columns sorted by group; None if they are."""
    _, scale = _check(parts, shape)
    group_of = _groups(parts, shape[1], scale.array.shape[0])
    if group_of is None or (np.diff(group_of) >= 0).all():
        return None
    return np.argsort(group_of, kind="stable").astype(np.int32)


def native(parts: Parts, shape: Shape, target: Target, less: int, rows_in_order: np.ndarray | None = None):
    codes, scale = _check(parts, shape)
    rows, columns = shape
    groups = scale.array.shape[0]
    check_groups(scale, columns, 0, target)
    group_of, columns_in_order = _groups(parts, columns, groups), order(parts, shape)
    if group_of is not None and not np.array_equal(np.sort(group_of), np.arange(columns) // target.group):
        raise ValueError(
            f"{parts['g_idx'].where} has groups of several sizes; GPTQ_INT4 keeps groups of {target.group}: use "
            f"{DECODING}"
        )
    zeros, scales, where = _zeros(parts, groups, rows, less), int4_scales(scale, target).T, parts.get("qzeros", scale)
    if columns_in_order is None and rows_in_order is None:
        return int4_matrix(codes.array, scales, zeros, where, target, "gptq")
    packed = np.ascontiguousarray(codes.array.T).view(np.uint8)  # [N, K / 2], even k in the low nibble
    if rows_in_order is not None:
        packed, scales = packed[rows_in_order], scales[rows_in_order]
        zeros = None if zeros is None else zeros[rows_in_order]
    if columns_in_order is not None:
        nibbles = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(rows, columns)
        nibbles = nibbles.take(columns_in_order, axis=1)
        packed = nibbles[:, ::2] | nibbles[:, 1::2] << np.uint8(4)
    return int4_matrix(packed, scales, zeros, where, target)


def group(parts: Parts, shape: Shape) -> int:
    _, scale = _check(parts, shape)
    columns, count = shape[1], scale.array.shape[0]
    if (index := _groups(parts, columns, count)) is not None and count > 1:
        return int(np.bincount(index).max())  # the last one may be ragged
    return shared_size(columns, count, group_size(columns, count, scale, 0))


def fits(shapes: dict[str, tuple[int, ...]]) -> bool:
    return len(shapes["qweight"]) == len(shapes["scales"]) == 2 and shapes["qweight"][1] == shapes["scales"][1]


GPTQ = Encoding(
    "GPTQ",
    "GPTQ_INT4",
    ("int4z", "rawint4"),
    {"qweight": ("I32",), "scales": FLOATS},
    shape,
    partial(decode, less=1),
    partial(native, less=1),
    group,
    optional={"qzeros": ("I32",), "g_idx": ("I32", "I64")},
    fits=fits,
    order=order,
)
GPTQ_V2 = replace(GPTQ, name="GPTQ version 2", decode=partial(decode, less=0), native=partial(native, less=0))
