"""Repeated calls, and what is said about them."""

import time
from collections.abc import Callable


def quiet(samples: list[float]) -> float:
    """The lowest tenth ends there: what others do on a machine makes a call slower, never faster."""
    return sorted(samples)[len(samples) // 10]


def sample(call: Callable[[int], None], seconds: float, first: int = 0) -> list[float]:
    """Microseconds of call(first), call(first + 1), ... for about ``seconds``, at least one."""
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        start = time.perf_counter()
        call(first + len(samples))
        samples.append((time.perf_counter() - start) * 1e6)
    return samples
