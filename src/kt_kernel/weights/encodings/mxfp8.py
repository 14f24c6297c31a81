"""MXFP8: weight[n, k] = e4m3(weight[n, k]) * 2^(scale[n, k // 32] - 127).

weight F8_E4M3 [N, K]; weight_scale_inv U8 or F8_E8M0 [N, ceil(K / 32)].
"""

import numpy as np

from kt_kernel.weights.encodings.fp8_block import shape
from kt_kernel.weights.encodings.lookup import by_scale_code, products
from kt_kernel.weights.encodings.native import Target, check_groups, encoded
from kt_kernel.weights.encodings.small_floats import E4M3, E4M3_NAN
from kt_kernel.weights.encodings.stored import Encoding, Parts, Shape, Stored, e8m0_scales, refuse_code

GROUP = 32


def _check(parts: Parts, shape: Shape) -> tuple[Stored, Stored]:
    codes, scale = parts["weight"], parts["weight_scale_inv"]
    codes.check_shape(shape)
    scale.check_shape((shape[0], -(-shape[1] // GROUP)))
    return codes, scale


def decode(parts: Parts, shape: Shape) -> np.ndarray:
    codes, scale = _check(parts, shape)
    refuse_code(codes, E4M3_NAN, 0x7F)
    table = products(e8m0_scales(scale, np.nanmax(E4M3)), E4M3)
    return by_scale_code(codes.array, scale.array, table, GROUP)


def native(parts: Parts, shape: Shape, target: Target):
    codes, scale = _check(parts, shape)
    check_groups(scale, shape[1], 1, target)
    return encoded(codes.array, scale.array)


MXFP8 = Encoding(
    "MXFP8",
    "MXFP8",
    ("mxfp8",),
    {"weight": ("F8_E4M3",), "weight_scale_inv": ("U8", "F8_E8M0")},
    shape,
    decode,
    native,
    lambda *_: GROUP,
)
