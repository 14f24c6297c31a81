"""NVFP4: weight[n, k] = e2m1(nibble k of row n) * e4m3(weight_scale[n, k // 16]) * weight_scale_2.

weight U8 or I8 [N, K / 2], even k in the low nibble; weight_scale F8_E4M3 [N, ceil(K / 16)]; weight_scale_2 one number,
f32. The product of all three is rounded once.
"""

import numpy as np

from kt_kernel.weights.encodings.mxfp4 import check_e2m1, decode_e2m1, shape
from kt_kernel.weights.encodings.native import Target, check_groups, encoded
from kt_kernel.weights.encodings.small_floats import E2M1
from kt_kernel.weights.encodings.stored import Encoding, Parts, Shape, e4m3_scales

GROUP = 16


def _factor(parts: Parts) -> np.ndarray:
    whole = parts["weight_scale_2"]
    whole.check_shape((), (1,))
    return whole.array.reshape(1)


def decode(parts: Parts, shape: Shape) -> np.ndarray:
    factor = float(_factor(parts)[0])
    if not np.isfinite(factor):
        raise ValueError(f"{parts['weight_scale_2'].where} is {factor}; needed is a finite scale")
    return decode_e2m1(parts, shape, "weight_scale", GROUP, lambda stored: e4m3_scales(stored, factor, E2M1.max()))


def native(parts: Parts, shape: Shape, target: Target):
    codes, scale = check_e2m1(parts, shape, "weight_scale", GROUP)
    check_groups(scale, shape[1], 1, target)
    return encoded(codes.array.view(np.uint8), scale.array, rows=_factor(parts))


NVFP4 = Encoding(
    "NVFP4",
    "NVFP4",
    ("nvfp4",),
    {"weight": ("U8", "I8"), "weight_scale": ("F8_E4M3",), "weight_scale_2": ("F32",)},
    shape,
    decode,
    native,
    lambda *_: GROUP,
    refused=("pre_quant_scale",),  # of activations, and the weights were divided by it
)
