"""What the forward that a thread makes next computes; the cache knows, and attention asks."""

import threading
from dataclasses import dataclass

_step = threading.local()


@dataclass(frozen=True)
class Rows:
    """Row i is n_tokens tokens of slot slots[i], the first at positions[i]."""

    slots: tuple[int, ...]
    positions: tuple[int, ...]
    n_tokens: int


def set_rows(rows: Rows | None) -> None:
    """For the forward that this thread makes next."""
    _step.rows = rows


def current_rows() -> Rows | None:
    return getattr(_step, "rows", None)
