"""Decoding by tables: a table has the rounded products of one scale with all codes, so each weight is rounded once."""

import numpy as np

from kt_kernel.weights.floats import BF16_LIMIT, round_once

CHUNK = 1 << 16  # weights at a time: indices and results stay in L2


def rows_of_chunk(columns: int) -> int:
    return max(1, CHUNK // max(1, columns))


def products(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """[..., len(codes)] bf16 bits of f32 or f64 scales with the values of codes.

    Exact in f64: a code has up to 4 significant bits, a scale up to 28. What is NaN or too large for bf16 gives 0 too:
    such scales were refused where they are used.
    """
    exact = scales.astype(np.float64)[..., None] * codes
    exact[~(np.abs(exact) < BF16_LIMIT)] = 0
    return round_once(exact)


def by_block(codes: np.ndarray, tables: np.ndarray, block_rows: int, block_columns: int) -> np.ndarray:
    """out[n, k] = tables[n // block_rows, k // block_columns, codes[n, k]]"""
    rows, columns = codes.shape
    out = np.empty(codes.shape, np.uint16)
    flat = tables.reshape(-1)
    of_column = (np.arange(columns) // block_columns * 256).astype(np.intp)
    of_row = (np.arange(rows) // block_rows * tables.shape[1] * 256).astype(np.intp)
    step = rows_of_chunk(columns)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        index = codes[part] + of_column
        index += of_row[part, None]
        np.take(flat, index, out=out[part], mode="wrap")  # "raise" would copy
    return out


def by_scale_code(codes: np.ndarray, scale_codes: np.ndarray, table: np.ndarray, group: int) -> np.ndarray:
    """out[n, k] = table[scale_codes[n, k // group], codes[n, k]], of the type of the table, [256, 256]"""
    out = np.empty(codes.shape, table.dtype)
    step = rows_of_chunk(codes.shape[1])
    for begin in range(0, len(codes), step):
        part = slice(begin, begin + step)
        index = np.repeat(scale_codes[part].astype(np.intp) << 8, group, axis=1)[:, : codes.shape[1]]
        np.take(table.reshape(-1), index + codes[part], out=out[part], mode="wrap")
    return out


def pairs(table: np.ndarray) -> np.ndarray:
    """[..., 16] of nibbles -> [..., 256] of bytes: the low nibble's entry first, in an element of twice the size."""
    byte = np.arange(256)
    both = np.stack([table[..., byte & 15], table[..., byte >> 4]], axis=-1)
    return both.view(f"u{2 * table.itemsize}")[..., 0]
