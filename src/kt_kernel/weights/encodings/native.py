"""Encoded matrices as a layer keeps them: views of the codes, and scales in the width of the layer's format."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kt_kernel.methods import DECODING
from kt_kernel.weights.encodings.stored import Parts, Stored, float_scales
from kt_kernel.weights.floats import to_f32

if TYPE_CHECKING:
    from kt_kernel import _core


class Target(NamedTuple):
    """The layer."""

    format: str
    group: int  # weights of a row that share a scale


def encoded(codes: np.ndarray, *arrays: np.ndarray | None, **options) -> "_core.EncodedMatrix":
    from kt_kernel import _core

    return _core.EncodedMatrix(codes, *arrays, **options)


def check_groups(scale: Stored, depth: int, axis: int, target: Target) -> None:
    needed = -(-depth // target.group)
    if scale.array.shape[axis] != needed:
        raise scale.wrong(
            f"{needed} in dimension {axis}: this layer was made for groups of {target.group}. Make it when the weights "
            f"are there, or use {DECODING}"
        )


def as_f32(scale: Stored) -> np.ndarray:
    """Exact, and a view if it is f32 already."""
    return scale.array if scale.dtype == "F32" else to_f32(scale.array)


def int4_scales(scale: Stored, target: Target) -> np.ndarray:
    """bf16 bits for rawint4, f16 for int4z; scales that would have to be rounded are refused."""
    dtype = "BF16" if target.format == "rawint4" else "F16"
    if scale.dtype == dtype:
        return scale.array
    wide = float_scales(scale, 1)
    if dtype == "BF16":
        bits = wide.view(np.uint32)
        narrow, exact = (bits >> np.uint32(16)).astype(np.uint16), not (bits & np.uint32(0xFFFF)).any()
    else:
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float16)
        exact = np.array_equal(narrow.astype(np.float32), wide)
    if not exact:
        raise ValueError(
            f"{scale.where} is {scale.dtype} and has scales that {target.format}, the format of this layer, would "
            f"round to {dtype}: use {DECODING}"
        )
    return narrow


def int4_matrix(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, where: Stored, target: Target, order: str = "rows"
) -> "_core.EncodedMatrix":
    if zeros is not None and target.format == "rawint4":
        raise ValueError(
            f"{where.where} has zero points other than 8, which rawint4, the format of this layer, lacks: use "
            f"method='GPTQ_INT4' or 'AWQ', or {DECODING}"
        )
    return encoded(codes, scales, zeros, order=order)


# What the core calls the arrays of a matrix -> the tensor, of those that are there, that the array is.
_TENSORS = {
    "codes": ("weight", "weight_packed", "qweight"),
    "factors of the rows": ("weight_scale_2", "weight_scale"),
    "scales": ("weight_scale_inv", "weight_scale", "scale", "scales"),
    "zeros": ("qzeros",),
}


def name_tensor(message: str, parts: dict[str, Parts]) -> str:
    """A message of the core with file and tensor; `parts` are those of gate, up and down."""
    for array, suffixes in _TENSORS.items():
        for projection, found in parts.items():
            if message.startswith(prefix := f"{array} of {projection} "):
                stored = next(found[suffix] for suffix in suffixes if suffix in found)
                return f"{stored.where}: {array} {message.removeprefix(prefix)}"
    return message
