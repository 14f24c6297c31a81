"""FP8 with block scales: weight[n, k] = e4m3(weight[n, k]) * scale[n // bn, k // bk].

weight F8_E4M3 [N, K]; weight_scale_inv or weight_scale [ceil(N / bn), ceil(K / bk)] in f32, bf16 or f16. "inv" is part
of the name only: the scale multiplies.
"""

import numpy as np

from kt_kernel.weights.encodings.groups import block_size
from kt_kernel.weights.encodings.lookup import by_block, products
from kt_kernel.weights.encodings.small_floats import E4M3, E4M3_NAN
from kt_kernel.weights.encodings.stored import FLOATS, Encoding, Parts, Shape, Stored, float_scales, refuse_code


def shape(parts: Parts) -> Shape:
    codes = parts["weight"]
    if codes.array.ndim != 2:
        raise codes.wrong("a matrix")
    return codes.array.shape


def decode_blocks(codes: Stored, scale: Stored, shape: Shape) -> np.ndarray:
    codes.check_shape(shape)
    if scale.array.ndim != 2:
        raise scale.wrong("a matrix of scales, one for each block")
    sizes = [block_size(*both, scale, axis) for axis, both in enumerate(zip(shape, scale.array.shape, strict=True))]
    refuse_code(codes, E4M3_NAN, 0x7F)
    return by_block(codes.array, products(float_scales(scale, np.nanmax(E4M3)), E4M3), *sizes)


def decode(parts: Parts, shape: Shape) -> np.ndarray:
    return decode_blocks(parts["weight"], parts["weight_scale_inv"], shape)


FP8_BLOCK = Encoding("FP8 block", {"weight": ("F8_E4M3",), "weight_scale_inv": FLOATS}, shape, decode)
