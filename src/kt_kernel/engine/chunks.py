"""Where prompts are cut for prefill, so that running decodes wait for a bounded time only.

Cuts are multiples of powers of two that depend on the position in the prompt and on nothing else. They are fixed when
the engine starts: a request is cut alike whatever else runs, and so computed alike, to the bit. A prefix is reused up
to a cut, for the same reason; at worst one chunk is computed again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

MIN_CHUNK = 32
MAX_CHUNK = 2048
# Where the cost of attention is measured: far enough from the start to stand out, within most contexts.
FAR = 2048


@dataclass(frozen=True)
class ChunkPlan:
    """(start, size) of ranges. Sizes are powers of two and get smaller; a start is a multiple of the size before."""

    ranges: tuple[tuple[int, int], ...]

    def next_cut(self, position: int) -> int:
        """The first cut after position."""
        start, size = self._range(position)
        return start + ((position - start) // size + 1) * size

    def last_cut(self, position: int) -> int:
        """The last cut at or before position."""
        start, size = self._range(position)
        return start + (position - start) // size * size

    def _range(self, position: int) -> tuple[int, int]:
        return next(found for found in reversed(self.ranges) if found[0] <= position)


def fixed(size: int) -> ChunkPlan:
    return ChunkPlan(((0, size),))


def plan(seconds_of: dict[int, float], seconds_per_pair: float, budget_s: float) -> ChunkPlan:
    """From the time of chunks at the start of a prompt, by size, and of one query meeting one key.

    A chunk of n tokens at position p takes seconds_of[n] + seconds_per_pair * n * p. The smallest has no limit.
    """
    ranges: list[tuple[int, int]] = []
    position = 0
    for size in sorted(seconds_of, reverse=True):
        if size == min(seconds_of):
            ranges.append((position, size))
            break
        spare = budget_s - seconds_of[size]
        if spare < 0:
            continue
        reach = spare / max(seconds_per_pair * size, 1e-15)
        end = int(min(reach, 1 << 40)) // size * size + size  # the last chunk may start at `reach`
        if end > position:
            ranges.append((position, size))
            position = end
    return ChunkPlan(tuple(ranges))


def measure(prefill: Callable[[int, int], None], budget_s: float, context: int) -> ChunkPlan:
    """prefill(position, n) computes a chunk of n tokens at a position; about six times the budget in all.

    The better of two times: what others did on the machine for a moment would make chunks small for good.
    """

    def seconds(position: int, n: int) -> float:
        times = []
        for _ in range(2):
            start = time.perf_counter()
            prefill(position, n)
            times.append(time.perf_counter() - start)
        return min(times)

    prefill(0, min(MIN_CHUNK, context))  # first use of kernels and buffers
    seconds_of = {MIN_CHUNK: seconds(0, min(MIN_CHUNK, context))}
    if seconds_of[MIN_CHUNK] > budget_s:
        return fixed(MIN_CHUNK)
    size = 2 * MIN_CHUNK
    while size <= min(MAX_CHUNK, context) and 1.5 * seconds_of[size // 2] <= budget_s:
        seconds_of[size] = seconds(0, size)
        size *= 2
    if context < FAR + MIN_CHUNK:
        return plan(seconds_of, 0.0, budget_s)
    extra = seconds(FAR, MIN_CHUNK) - seconds(0, MIN_CHUNK)
    return plan(seconds_of, max(extra, 0.0) / (FAR * MIN_CHUNK), budget_s)
