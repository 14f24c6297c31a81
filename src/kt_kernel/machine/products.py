"""What products cost here: one expert of a given shape and format, by the number of rows that it multiplies.

A call is timed with weights that no cache holds: calls go round experts that are four times the last-level cache
together. Routing is even: every expert of a call has exactly `rows` rows. What a call costs beside its weights (the
job, its barriers) is timed on a layer with next to none, and taken off.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from kt_kernel import _core
from kt_kernel.bench.layer import Layers
from kt_kernel.bench.shapes import Shape, planned_bytes
from kt_kernel.bench.timing import quiet, sample
from kt_kernel.machine import system

ROWS = (1, 4, 16, 64, 256)
_TOP_K = 8
# Of a call, if fewer experts make that possible: one that the scheduler interrupts, after 3 ms or more, tells nothing.
_LONGEST_US = 2000.0
_LEAST_BYTES, _MOST_BYTES = 96 << 20, 2 << 30


@dataclass(frozen=True)
class Products:
    """Of one format and shape of experts."""

    points: tuple[tuple[int, float], ...]  # (rows, seconds for each weight), by rows
    pack_seconds: float  # for each weight that comes as bf16; 0: weights come packed

    def seconds(self, rows: float, weights: float) -> float:
        """Of matrices with `weights` elements that `rows` rows are multiplied with.

        Between two points times follow a power of the rows; beyond the last they grow as the rows do.
        """
        first, last = self.points[0], self.points[-1]
        if rows >= last[0]:
            return weights * last[1] * rows / last[0]
        if rows <= first[0]:
            return weights * first[1]
        above = bisect_left(self.points, (rows, 0.0))
        (low, low_s), (high, high_s) = self.points[above - 1], self.points[above]
        share = math.log(rows / low) / math.log(high / low)
        return weights * low_s * (high_s / low_s) ** share


class EvenBatch:
    """`rows` tokens that all go to the same `used` experts; the next call takes the next ones."""

    def __init__(self, shape: Shape, rows: int, used: int):
        self.tokens, self.used = rows, used
        routings = max(1, shape.experts // used)
        self._ids = np.full((routings, rows, shape.top_k), -1, np.int64)
        for routing in range(routings):
            self._ids[routing, :, :used] = routing * used + np.arange(used)
        self._arrays = (
            np.full((rows, shape.top_k), 1 / shape.top_k, np.float32),
            np.full((rows, shape.hidden), 0x3F80, np.uint16),  # 1.0
            np.zeros((rows, shape.hidden), np.uint16),
        )
        common = [array.ctypes.data for array in self._arrays]
        self._addresses = [(ids.ctypes.data, *common) for ids in self._ids]

    def addresses(self, call: int) -> tuple[int, int, int, int]:
        return self._addresses[call % len(self._addresses)]


def measure_products(
    pool: "_core.Pool", weight_format: str, hidden: int, intermediate: int, seconds: float
) -> Products:
    """`seconds` is the time for calls; making the weights takes about as long again."""
    shape = _shape(weight_format, hidden, intermediate)
    layers = Layers(pool, shape, weight_format, max(ROWS), 1)
    layers.fill_random()
    call_us = measure_call_us(pool)
    points = []
    for rows in ROWS:
        batch = _short_batch(layers, rows)
        us = quiet(sample(lambda call, batch=batch: layers.forward(batch, call), seconds / len(ROWS), 1))
        points.append((rows, less_call(us, call_us) / 1e6 / (batch.used * shape.weights_per_expert)))
    return Products(tuple(points), _pack_seconds(pool, weight_format, shape))


def less_call(us: float, call_us: float) -> float:
    """Without what a call costs by itself; that is never more than half of a call that has work to do."""
    return max(us - call_us, us / 2)


def _short_batch(layers: Layers, rows: int) -> EvenBatch:
    """Of as many experts as a short call allows."""
    used = layers.shape.top_k
    while True:
        batch = EvenBatch(layers.shape, rows, used)
        layers.forward(batch, 0)  # touches every buffer
        if used == 1 or min(sample(lambda call, batch=batch: layers.forward(batch, call), 0.0, 1)) <= _LONGEST_US:
            return batch
        used //= 2


def measure_call_us(pool: "_core.Pool", seconds: float = 0.05) -> float:
    """A layer's call with almost no weights: the job, the plan and the barriers."""
    shape = Shape("empty", 16, _TOP_K, 64, 64)
    layers = Layers(pool, shape, "bf16", 1, 1)
    layers.fill_random()
    batch = EvenBatch(shape, 1, _TOP_K)
    return min(sample(lambda call: layers.forward(batch, call), seconds))


def _shape(weight_format: str, hidden: int, intermediate: int) -> Shape:
    shape = Shape("probe", _TOP_K, _TOP_K, hidden, intermediate)
    packed = planned_bytes(shape, weight_format)
    wanted = min(max(_LEAST_BYTES, 4 * system.l3_bytes()), _MOST_BYTES, system.available_bytes() // 4)
    experts = min(512, max(2 * _TOP_K, wanted // packed))
    return Shape("probe", experts, _TOP_K, hidden, intermediate)


def _pack_seconds(pool: "_core.Pool", weight_format: str, shape: Shape) -> float:
    """For each weight, from bf16 in memory. Formats that keep the codes of files are copied, at the speed of memory."""
    if weight_format not in ("bf16", "int8", "int4", "int4g"):
        return 0.0
    layer = _core.MoELayer(
        pool,
        format=weight_format,
        num_experts=1,
        top_k=1,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        max_tokens=1,
    )
    values = np.random.default_rng(0).standard_normal(1 << 16, np.float32).view(np.uint32) >> 16
    rows = np.resize(values.astype(np.uint16), shape.hidden * shape.intermediate)
    gate, down = (rows.reshape(s) for s in ((shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)))
    layer.load_expert(0, gate, gate, down)
    us = quiet(sample(lambda _: layer.load_expert(0, gate, gate, down), 0.05))
    return us / 1e6 / shape.weights_per_expert
