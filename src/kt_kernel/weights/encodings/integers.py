"""4-bit integers with group scales and zero points: weight[n, k] = (nibble - zero[n, g]) * scale[n, g]."""

import numpy as np

from kt_kernel.weights.encodings.lookup import pairs, rows_of_chunk
from kt_kernel.weights.floats import round_finite, round_once

LARGEST = 16  # |nibble - zero|, with zeros up to 16

_BYTES = pairs(np.arange(16, dtype=np.float32))  # byte -> two f32


def unpacked(packed: np.ndarray) -> np.ndarray:
    """Bytes [n, c], even k in the low nibble -> f32 [n, 2c]"""
    return _BYTES.take(packed).view(np.float32)


def decode_groups(
    rows_of, shape: tuple[int, int], scales: np.ndarray, zeros: np.ndarray | int, group_of: np.ndarray
) -> np.ndarray:
    """bf16 bits [N, K].

    rows_of(slice) gives nibbles as f32, at least K columns; scales and zeros are [N, G]; group_of[k] is the group of
    column k. A difference has 5 bits: the f32 product is exact if scales have up to 19, else it is made in f64.
    """
    rows, columns = shape
    out = np.empty(shape, np.uint16)
    exact = not (scales.view(np.uint32) & np.uint32(0x1F)).any()
    every = zeros if np.ndim(zeros) == 0 else None
    repeats = np.bincount(group_of, minlength=scales.shape[1]) if (np.diff(group_of) >= 0).all() else None

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, repeats, axis=1) if repeats is not None else values.take(group_of, axis=1)

    step = rows_of_chunk(columns)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        values = rows_of(part)
        values = values if values.shape[1] == columns else np.ascontiguousarray(values[:, :columns])
        values -= np.float32(every) if every is not None else spread(zeros[part])
        if exact:
            values *= spread(scales[part])
            out[part] = round_finite(values)
        else:
            out[part] = round_once(values * spread(scales[part].astype(np.float64)))
    return out
