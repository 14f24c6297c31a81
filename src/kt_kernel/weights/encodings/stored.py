"""Tensors of one matrix as a file has them, and the checks that every encoding needs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kt_kernel.weights.encodings.small_floats import E4M3, E4M3_NAN, E8M0, E8M0_NAN
from kt_kernel.weights.floats import BF16_LIMIT, to_f32

if TYPE_CHECKING:
    from kt_kernel import _core
    from kt_kernel.weights.encodings.native import Target

_CHUNK = 1 << 18  # codes looked at at a time
FLOATS = ("BF16", "F16", "F32")


class Stored(NamedTuple):
    where: str  # file and tensor, for messages
    dtype: str
    array: np.ndarray  # bf16 as uint16, fp8 as uint8

    def wrong(self, needed: object) -> ValueError:
        return ValueError(f"{self.where} is {self.dtype} {list(self.array.shape)}; needed is {needed}")

    def check_shape(self, *shapes: tuple[int, ...]) -> None:
        if self.array.shape not in shapes:
            raise self.wrong(" or ".join(str(list(shape)) for shape in shapes))


Parts = dict[str, Stored]  # suffix -> tensor
Shape = tuple[int, int]


@dataclass(frozen=True)
class Encoding:
    """A matrix [N, K] in several tensors: suffixes of its name, with the dtypes that they may have."""

    name: str
    method: str  # that keeps it as it is
    formats: tuple[str, ...]  # of layers that keep it, the usual one first
    needed: dict[str, tuple[str, ...]]  # the codes come first
    shape: Callable[[Parts], Shape]  # of the matrix, as far as the codes tell it
    decode: Callable[[Parts, Shape], np.ndarray]  # bf16 bits
    native: "Callable[[Parts, Shape, Target], _core.EncodedMatrix]"
    group: Callable[
        [Parts, Shape], int
    ]  # weights of a row that share a scale; 0: no groups; a single one may be larger
    optional: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()  # tensors that change the meaning in a way that is not decoded here
    fits: Callable[[dict[str, tuple[int, ...]]], bool] = lambda _: True  # shapes, where dtypes do not decide
    # Columns as `native` sorts them, None if they stay. It then also takes an order of the rows.
    order: Callable[[Parts, Shape], np.ndarray | None] = lambda *_: None

    @property
    def codes(self) -> str:
        return next(iter(self.needed))


def float_scales(stored: Stored, largest: float) -> np.ndarray:
    """As f32; the largest code times a scale must be finite in bf16."""
    scales = to_f32(stored.array)
    _check_scales(stored, scales, largest)
    return scales


def e4m3_scales(stored: Stored, factor: float, largest: float) -> np.ndarray:
    """codes -> f64 scales, as a table: 256 entries, NaN where no code is."""
    refuse_code(stored, E4M3_NAN, 0x7F)
    scales = E4M3 * factor
    _check_scales(stored, scales[np.unique(stored.array)], largest)
    return scales


def e8m0_scales(stored: Stored, largest: float) -> np.ndarray:
    refuse_code(stored, E8M0_NAN, 0xFF)
    _check_scales(stored, E8M0[np.unique(stored.array)], largest)
    return E8M0


def _check_scales(stored: Stored, scales: np.ndarray, largest: float) -> None:
    most = float(np.abs(scales).max(initial=0))
    if not most * largest < BF16_LIMIT:  # NaN is not either
        raise ValueError(
            f"{stored.where} has a scale of {most:.4g}; needed are finite scales, with codes up to {largest:g} times "
            "the scale below 3.4e38: the file is damaged, or encoded in another way"
        )


def refuse_code(stored: Stored, code: int, mask: int) -> None:
    """Codes that mean NaN."""
    flat = stored.array.reshape(-1)
    for begin in range(0, len(flat), _CHUNK):
        if ((flat[begin : begin + _CHUNK] & np.uint8(mask)) == code).any():
            raise ValueError(
                f"{stored.where} has codes that mean NaN (0x{code:02X}); needed are finite weights and scales: the "
                "file is damaged, or encoded in another way"
            )
