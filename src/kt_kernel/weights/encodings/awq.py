"""AWQ: weight[n, k] = (nibble n of row k - zero[k // g, n]) * scales[k // g, n].

qweight I32 [K, N / 8] and qzeros I32 [G, N / 8]: bits 4p..4p+3 of element j are for n = 8j + ORDER[p]; scales [G, N] in
f16, bf16 or f32. Zero points are stored as they are.
"""

import numpy as np

from kt_kernel.weights.encodings.groups import group_size, shared_size
from kt_kernel.weights.encodings.integers import LARGEST, decode_groups
from kt_kernel.weights.encodings.native import Target, check_groups, int4_matrix, int4_scales
from kt_kernel.weights.encodings.stored import FLOATS, Encoding, Parts, Shape, Stored, float_scales

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def shape(parts: Parts) -> Shape:
    depth, packed = parts["qweight"].array.shape
    return 8 * packed, depth


def _turned(packed: np.ndarray) -> np.ndarray:
    """[K, N / 8] int32 -> nibbles [N, K]"""
    turned = np.ascontiguousarray(packed.T).view(np.uint32)
    out = np.empty((len(turned), 8, turned.shape[1]), np.uint8)
    for position, n in enumerate(ORDER):
        plane = turned >> np.uint32(4 * position)
        plane &= np.uint32(15)
        out[:, n] = plane
    return out.reshape(-1, turned.shape[1])


def _check(parts: Parts, shape: Shape) -> tuple[Stored, Stored, Stored]:
    codes, scale, zero = (parts[name] for name in ("qweight", "scales", "qzeros"))
    rows, columns = shape
    if rows % 8:
        raise codes.wrong(f"a multiple of 8 rows, not {rows}")
    codes.check_shape((columns, rows // 8))
    if scale.array.ndim != 2 or scale.array.shape[1] != rows:
        raise scale.wrong(f"[groups of the {columns} columns, {rows}]")
    return codes, scale, zero


def _check_zeros(zero: Stored, scale: Stored) -> None:
    zero.check_shape((scale.array.shape[0], scale.array.shape[1] // 8))


def decode(parts: Parts, shape: Shape) -> np.ndarray:
    codes, scale, zero = _check(parts, shape)
    columns = shape[1]
    group = group_size(columns, scale.array.shape[0], scale, 0)
    _check_zeros(zero, scale)
    nibbles = _turned(codes.array)
    return decode_groups(
        lambda part: nibbles[part].astype(np.float32),
        shape,
        np.ascontiguousarray(float_scales(scale, LARGEST).T),
        _turned(zero.array).astype(np.float32),
        np.arange(columns) // group,
    )


def native(parts: Parts, shape: Shape, target: Target):
    codes, scale, zero = _check(parts, shape)
    check_groups(scale, shape[1], 0, target)
    _check_zeros(zero, scale)
    zeros = None if (zero.array.view(np.uint32) == 0x88888888).all() else _turned(zero.array)
    return int4_matrix(codes.array, int4_scales(scale, target).T, zeros, zero, target, "awq")


def group(parts: Parts, shape: Shape) -> int:
    _, scale, _ = _check(parts, shape)
    count = scale.array.shape[0]
    return shared_size(shape[1], count, group_size(shape[1], count, scale, 0))


def fits(shapes: dict[str, tuple[int, ...]]) -> bool:
    return len(shapes["qweight"]) == len(shapes["scales"]) == 2 and 8 * shapes["qweight"][1] == shapes["scales"][1]


AWQ = Encoding(
    "AWQ",
    "AWQ",
    ("int4z", "rawint4"),
    {"qweight": ("I32",), "scales": FLOATS, "qzeros": ("I32",)},
    shape,
    decode,
    native,
    group,
    fits=fits,
)
