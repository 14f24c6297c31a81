"""MXFP4: weight[n, k] = e2m1(nibble k of row n) * 2^(scale[n, k // 32] - 127).

weight U8 or I8 [N, K / 2], even k in the low nibble; scale F8_E8M0 or U8 [N, ceil(K / 32)].
"""

import numpy as np

from kt_kernel.weights.encodings.lookup import by_scale_code, pairs, products
from kt_kernel.weights.encodings.native import Target, check_groups, encoded
from kt_kernel.weights.encodings.small_floats import E2M1
from kt_kernel.weights.encodings.stored import Encoding, Parts, Shape, Stored, e8m0_scales

GROUP = 32


def shape(parts: Parts) -> Shape:
    codes = parts["weight"]
    if codes.array.ndim != 2:
        raise codes.wrong("a matrix")
    rows, columns = codes.array.shape
    return rows, 2 * columns


def check_e2m1(parts: Parts, shape: Shape, scale: str, group: int) -> tuple[Stored, Stored]:
    codes, scale_codes = parts["weight"], parts[scale]
    rows, columns = shape
    if columns % 2:
        raise codes.wrong(f"an even number of columns, not {columns}")
    codes.check_shape((rows, columns // 2))
    scale_codes.check_shape((rows, -(-columns // group)))
    return codes, scale_codes


def decode_e2m1(parts: Parts, shape: Shape, scale: str, group: int, scales) -> np.ndarray:
    """`scales(stored)` gives what the 256 codes of a scale mean."""
    codes, scale_codes = check_e2m1(parts, shape, scale, group)
    table = pairs(products(scales(scale_codes), E2M1))
    out = by_scale_code(codes.array.view(np.uint8), scale_codes.array, table, group // 2)
    return out.view(np.uint16)


def decode(parts: Parts, shape: Shape) -> np.ndarray:
    return decode_e2m1(parts, shape, "scale", GROUP, lambda stored: e8m0_scales(stored, E2M1.max()))


def native(parts: Parts, shape: Shape, target: Target):
    codes, scale = check_e2m1(parts, shape, "scale", GROUP)
    check_groups(scale, shape[1], 1, target)
    return encoded(codes.array.view(np.uint8), scale.array)


MXFP4 = Encoding(
    "MXFP4",
    "MXFP4",
    ("mxfp4",),
    {"weight": ("I8", "U8"), "scale": ("F8_E8M0", "U8")},
    shape,
    decode,
    native,
    lambda *_: GROUP,
)
