"""Experts of a layer in tensors of three dimensions, the first of which is the expert.

straight  gate above up [E, 2I, H], or gate and up alone [E, I, H]; down [E, H, I]
turned    gate beside up [E, H, 2I]; down [E, I, H]
"""

import mmap
from collections.abc import Sequence

import numpy as np

from kt_kernel.weights.experts import Sizes
from kt_kernel.weights.tensor_files import TensorFiles

_BLOCK = 64  # rows transposed at a time: they stay in L2


def is_turned(both: Sequence[int], down: Sequence[int]) -> bool:
    """Of gate and up in one tensor. Nothing can be both: straight has the depth of down twice, turned has it once."""
    return len(both) == len(down) == 3 and (both[1], both[2]) == (down[2], 2 * down[1])


def read(
    files: TensorFiles,
    name: str,
    dtypes: Sequence[str],
    projection: str,
    sizes: Sizes,
    experts: int,
    expert: int,
    joined: bool,
    turned: bool,
) -> np.ndarray:
    """A projection [N, K] of one expert: a view of the file, or a copy of this expert if it is turned.

    `joined`: gate and up are in one tensor.
    """
    rows, depth = sizes.shape(projection)
    joined = joined and projection != "down"
    total, first = (2 * rows, rows if projection == "up" else 0) if joined else (rows, 0)
    mine = slice(first, first + rows)
    if turned:
        return _turn(files.item(name, dtypes, (experts, depth, total), expert)[:, mine])
    return files.item(name, dtypes, (experts, total, depth), expert, mine)


def _turn(array: np.ndarray) -> np.ndarray:
    """A transposed copy. In blocks it takes 0.4 of the time that numpy needs for [7168, 2048] at once.

    In a mapping of its own: malloc would keep the memory of some copies after the load.
    """
    turned = np.frombuffer(mmap.mmap(-1, max(1, array.nbytes)), array.dtype, array.size).reshape(array.shape[::-1])
    for begin in range(0, len(array), _BLOCK):
        turned[:, begin : begin + _BLOCK] = array[begin : begin + _BLOCK].T
    return turned
