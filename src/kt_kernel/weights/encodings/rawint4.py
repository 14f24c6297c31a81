"""int4 as compressed-tensors packs it: weight[n, k] = (nibble k of row n - 8) * scale[n, k // g].

weight_packed I32 [N, ceil(K / 8)], k in ascending bits, which are the bytes of U8 [N, ceil(K / 2)] with even k in the
low nibble; weight_scale [N, groups] in bf16, f16 or f32; weight_shape, if there, holds N and K.
"""

import numpy as np

from kt_kernel.weights.encodings.groups import group_size, shared_size
from kt_kernel.weights.encodings.integers import LARGEST, decode_groups, unpacked
from kt_kernel.weights.encodings.native import Target, check_groups, int4_matrix, int4_scales
from kt_kernel.weights.encodings.stored import FLOATS, Encoding, Parts, Shape, Stored, float_scales

ZERO = 8


def shape(parts: Parts) -> Shape:
    packed = parts["weight_packed"]
    if packed.array.ndim != 2:
        raise packed.wrong("a matrix")
    if "weight_shape" in parts:
        said = parts["weight_shape"]
        said.check_shape((2,))
        return tuple(map(int, said.array))
    rows, columns = packed.array.shape
    return rows, columns * 2 * packed.array.itemsize


def _check(parts: Parts, shape: Shape) -> tuple[Stored, Stored]:
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    rows, columns = shape
    if "weight_shape" in parts:
        said = parts["weight_shape"]
        said.check_shape((2,))
        if tuple(said.array) != shape:
            raise ValueError(f"{said.where} says {said.array.tolist()}; needed is {list(shape)}")
    packed.check_shape((rows, -(-columns // (2 * packed.array.itemsize))))
    if scale.array.ndim != 2 or scale.array.shape[0] != rows:
        raise scale.wrong(f"[{rows}, groups of the {columns} columns]")
    return packed, scale


def decode(parts: Parts, shape: Shape) -> np.ndarray:
    packed, scale = _check(parts, shape)
    columns = shape[1]
    group = group_size(columns, scale.array.shape[1], scale, 1)
    data = packed.array.view(np.uint8)
    return decode_groups(
        lambda part: unpacked(data[part]), shape, float_scales(scale, LARGEST), ZERO, np.arange(columns) // group
    )


def native(parts: Parts, shape: Shape, target: Target):
    packed, scale = _check(parts, shape)
    check_groups(scale, shape[1], 1, target)
    codes = packed.array.view(np.uint8)[:, : (shape[1] + 1) // 2]
    return int4_matrix(codes, int4_scales(scale, target), None, scale, target)


def group(parts: Parts, shape: Shape) -> int:
    _, scale = _check(parts, shape)
    count = scale.array.shape[1]
    return shared_size(shape[1], count, group_size(shape[1], count, scale, 1))


RAWINT4 = Encoding(
    "RAWINT4",
    "RAWINT4",
    ("rawint4", "int4z"),
    {"weight_packed": ("I32", "U8"), "weight_scale": FLOATS},
    shape,
    decode,
    native,
    group,
    optional={"weight_shape": ("I64", "I32")},
    refused=("weight_zero_point", "weight_g_idx", "weight_global_scale"),
)
