"""Experts of a layer in MXFP4 as the files of gpt-oss have them: every matrix [N, K] of a packed tensor is two tensors.

{name}_blocks  U8 [E, N, K / 32, 16]: k = 32 g + 2 b is the low nibble of byte b of group g, k + 1 the high one
{name}_scales  U8 [E, N, K / 32], e8m0
Row 2i of gate and up is row i of gate, row 2i + 1 that of up.
"""

import numpy as np

from kt_kernel.weights.encodings import Parts, Stored
from kt_kernel.weights.encodings.mxfp4 import GROUP, MXFP4
from kt_kernel.weights.experts import Sizes
from kt_kernel.weights.packed import part
from kt_kernel.weights.tensor_files import TensorFiles

_BYTES = GROUP // 2  # of a group


def tensors_of(name: str) -> tuple[str, str]:
    return f"{name}_blocks", f"{name}_scales"


def sizes_of(files: TensorFiles, down: str) -> Sizes:
    name, _ = tensors_of(down)
    shape = files.entry(name).shape
    if len(shape) != 4 or shape[3] != _BYTES:
        raise ValueError(
            f"{files.file_of(name)}: tensor {name!r} has shape {list(shape)}; needed is [E, H, I / 32, 16]"
        )
    return Sizes(shape[1], GROUP * shape[2])


def parts(files: TensorFiles, name: str, projection: str, sizes: Sizes, experts: int, expert: int) -> Parts:
    """Codes [N, K / 2] and scales [N, K / 32] of a projection of one expert: views of the file."""
    rows, depth = sizes.shape(projection)
    total, mine = part(projection, rows, joined=True, alternating=True)
    groups = -(-depth // GROUP)
    shapes = {"weight": (experts, total, groups, _BYTES), "scale": (experts, total, groups)}
    found: Parts = {}
    for (kind, shape), tensor in zip(shapes.items(), tensors_of(name), strict=True):
        array = files.item(tensor, ("U8",), shape, expert)[mine].reshape(rows, -1)
        found[kind] = Stored(f"{files.file_of(tensor)}: tensor {tensor!r}", "U8", array)
    return found


def read(files: TensorFiles, name: str, projection: str, sizes: Sizes, experts: int, expert: int) -> np.ndarray:
    """bf16 bits [N, K] of a projection of one expert; exact."""
    return MXFP4.decode(parts(files, name, projection, sizes, experts, expert), sizes.shape(projection))
