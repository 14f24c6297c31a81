"""What single matrices cost here, by the number of rows that they are multiplied with: of attention, and the head.

As in products.py: copies that are four times the last-level cache together go round, and what a call costs beside its
weights is taken off. Matrices are cut to what a short call reads; their cost grows with their rows.
"""

import numpy as np

from kt_kernel import _core
from kt_kernel.bench.timing import quiet, sample
from kt_kernel.machine import system
from kt_kernel.machine.products import ROWS, Products, less_call

_LONGEST_BYTES = 16 << 20  # of a matrix: half a millisecond at 32 GB/s
_MOST_COPIES = 1024

Matrix = tuple[int, int]  # rows of outputs, columns of inputs


def measure_linears(
    pool: "_core.Pool", weight_format: str, matrices: tuple[Matrix, ...], call_us: float, seconds: float
) -> Products:
    """Of a set of matrices that are multiplied one after the other, for each of their weights."""
    total = dict.fromkeys(ROWS, 0.0)
    each = seconds / len(ROWS) / len(set(matrices))
    for rows, columns in set(matrices):
        weights = matrices.count((rows, columns)) * rows * columns
        for count, us_of_weight in _measure(pool, weight_format, rows, columns, call_us, each).items():
            total[count] += weights * us_of_weight
    all_weights = sum(rows * columns for rows, columns in matrices)
    return Products(tuple((count, us / 1e6 / all_weights) for count, us in total.items()), 0.0)


def _measure(
    pool: "_core.Pool", weight_format: str, rows: int, columns: int, call_us: float, seconds: float
) -> dict[int, float]:
    """Microseconds for each weight, by the number of rows that are multiplied."""
    cut = max(16, min(rows, _LONGEST_BYTES // (2 * columns)))
    first = _linear(pool, weight_format, cut, columns)
    copies = min(_MOST_COPIES, max(2, 4 * system.l3_bytes() // first.packed_bytes))
    linears = [first, *(_linear(pool, weight_format, cut, columns) for _ in range(copies - 1))]
    found = {}
    for count in ROWS:
        rows_in = np.full((count, columns), 0x3F80, np.uint16)  # 1.0
        rows_out = np.empty((count, cut), np.uint16)
        addresses = (count, rows_in.ctypes.data, columns, rows_out.ctypes.data, cut)
        first.forward(*addresses)
        us = quiet(sample(lambda call, addresses=addresses: linears[call % copies].forward(*addresses), seconds))
        found[count] = less_call(us, call_us) / (cut * columns)
    return found


def _linear(pool: "_core.Pool", weight_format: str, rows: int, columns: int) -> "_core.Linear":
    linear = _core.Linear(pool, format=weight_format, rows=rows, columns=columns)
    linear.load(np.full((rows, columns), 0x3C00, np.uint16))
    return linear


def measure_linear_call_us(pool: "_core.Pool", seconds: float = 0.02) -> float:
    """A call with almost no weights: the job and its barrier."""
    linear = _linear(pool, "bf16", 16, 64)
    rows = np.zeros((2, 64), np.uint16)
    arguments = (1, rows[0].ctypes.data, 64, rows[1].ctypes.data, 16)
    return min(sample(lambda _: linear.forward(*arguments), seconds))
