"""FP8 with a scale for each row: weight[n, k] = e4m3(weight[n, k]) * scale[n].

weight F8_E4M3 [N, K]; weight_scale [N] or [N, 1], or one scale as [] or [1], in f32, bf16 or f16. Some models have
block scales under this name, which the shape tells: see fp8_block.py.
"""

import numpy as np

from kt_kernel.weights.encodings.fp8_block import shape
from kt_kernel.weights.encodings.lookup import by_block, products
from kt_kernel.weights.encodings.native import Target, as_f32, encoded
from kt_kernel.weights.encodings.small_floats import E4M3, E4M3_NAN
from kt_kernel.weights.encodings.stored import FLOATS, Encoding, Parts, Shape, Stored, float_scales, refuse_code


def _check(codes: Stored, scale: Stored, shape: Shape) -> None:
    codes.check_shape(shape)
    if scale.array.shape not in {(), (1,), (shape[0],), (shape[0], 1)}:
        raise scale.wrong(f"[{shape[0]}] or [{shape[0]}, 1], one scale for all, or [blocks of rows, blocks of columns]")


def decode(parts: Parts, shape: Shape) -> np.ndarray:
    codes, scale = parts["weight"], parts["weight_scale"]
    rows, columns = shape
    _check(codes, scale, shape)
    refuse_code(codes, E4M3_NAN, 0x7F)
    tables = products(float_scales(scale, np.nanmax(E4M3)).reshape(-1, 1), E4M3)
    return by_block(codes.array, tables, 1 if len(tables) == rows else rows, columns)


def native(parts: Parts, shape: Shape, _: Target):
    codes, scale = parts["weight"], parts["weight_scale"]
    _check(codes, scale, shape)
    return encoded(codes.array, rows=as_f32(scale).reshape(-1))


FP8_CHANNEL = Encoding(
    "FP8 per channel",
    "FP8_PERCHANNEL",
    ("fp8c",),
    {"weight": ("F8_E4M3",), "weight_scale": FLOATS},
    shape,
    decode,
    native,
    lambda *_: 0,
)
