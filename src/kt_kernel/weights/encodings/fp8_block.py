"""FP8 with block scales: weight[n, k] = e4m3(weight[n, k]) * scale[n // bn, k // bk].

weight F8_E4M3 [N, K]; weight_scale_inv or weight_scale [ceil(N / bn), ceil(K / bk)] in f32, bf16 or f16. "inv" is part
of the name only: the scale multiplies.
"""

import numpy as np

from kt_kernel.weights.encodings.groups import block_size, shared_size
from kt_kernel.weights.encodings.lookup import by_block, products
from kt_kernel.weights.encodings.native import Target, as_f32, check_groups, encoded
from kt_kernel.weights.encodings.small_floats import E4M3, E4M3_NAN
from kt_kernel.weights.encodings.stored import FLOATS, Encoding, Parts, Shape, Stored, float_scales, refuse_code


def shape(parts: Parts) -> Shape:
    codes = parts["weight"]
    if codes.array.ndim != 2:
        raise codes.wrong("a matrix")
    return codes.array.shape


def _block_size(scale: Stored, shape: Shape, axis: int) -> int:
    if scale.array.ndim != 2:
        raise scale.wrong("a matrix of scales, one for each block")
    return block_size(shape[axis], scale.array.shape[axis], scale, axis)


def _scale(parts: Parts) -> Stored:
    return parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]


def decode(parts: Parts, shape: Shape) -> np.ndarray:
    codes, scale = parts["weight"], _scale(parts)
    codes.check_shape(shape)
    sizes = [_block_size(scale, shape, axis) for axis in (0, 1)]
    refuse_code(codes, E4M3_NAN, 0x7F)
    return by_block(codes.array, products(float_scales(scale, np.nanmax(E4M3)), E4M3), *sizes)


def native(parts: Parts, shape: Shape, target: Target):
    codes, scale = parts["weight"], _scale(parts)
    codes.check_shape(shape)
    rows = _block_size(scale, shape, 0)
    check_groups(scale, shape[1], 1, target)
    return encoded(codes.array, as_f32(scale), block_rows=rows)


def group(parts: Parts, shape: Shape) -> int:
    scale = _scale(parts)
    return shared_size(shape[1], scale.array.shape[1], _block_size(scale, shape, 1))


def _fits(shapes: dict[str, tuple[int, ...]]) -> bool:
    """Scales under the name that those of rows have too."""
    scale = shapes["weight_scale"]
    return len(scale) == 2 and scale != (shapes["weight"][0], 1)


_WEIGHT = {"weight": ("F8_E4M3",)}
FP8_BLOCK, FP8_BLOCK_SCALE = (
    Encoding("FP8 block", "FP8", ("fp8",), _WEIGHT | {name: FLOATS}, shape, decode, native, group, **options)
    for name, options in (("weight_scale_inv", {}), ("weight_scale", {"fits": _fits}))
)
