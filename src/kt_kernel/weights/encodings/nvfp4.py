"""NVFP4: weight[n, k] = e2m1(nibble k of row n) * e4m3(weight_scale[n, k // 16]) * weight_scale_2.

weight U8 or I8 [N, K / 2], even k in the low nibble; weight_scale F8_E4M3 [N, ceil(K / 16)]; weight_scale_2 one number,
f32. The product of all three is rounded once.
"""

import numpy as np

from kt_kernel.weights.encodings.mxfp4 import decode_e2m1, shape
from kt_kernel.weights.encodings.small_floats import E2M1
from kt_kernel.weights.encodings.stored import Encoding, Parts, Shape, e4m3_scales

GROUP = 16


def decode(parts: Parts, shape: Shape) -> np.ndarray:
    whole = parts["weight_scale_2"]
    whole.check_shape((), (1,))
    factor = float(whole.array.reshape(()))
    if not np.isfinite(factor):
        raise ValueError(f"{whole.where} is {factor}; needed is a finite scale")
    return decode_e2m1(parts, shape, "weight_scale", GROUP, lambda stored: e4m3_scales(stored, factor, E2M1.max()))


NVFP4 = Encoding(
    "NVFP4",
    {"weight": ("U8", "I8"), "weight_scale": ("F8_E4M3",), "weight_scale_2": ("F32",)},
    shape,
    decode,
    refused=("pre_quant_scale",),  # of activations, and the weights were divided by it
)
