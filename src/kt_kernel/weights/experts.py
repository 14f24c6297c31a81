"""What every source of experts offers, whatever its files look like."""

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kt_kernel import _core

PROJECTIONS = ("gate", "up", "down")


class Sizes(NamedTuple):
    hidden: int
    intermediate: int

    def shape(self, projection: str) -> tuple[int, int]:
        return (self.hidden, self.intermediate) if projection == "down" else (self.intermediate, self.hidden)

    @classmethod
    def of(cls, layer: "_core.MoELayer") -> "Sizes":
        return cls(layer.hidden_size, layer.intermediate_size)


class Experts(Protocol):
    """The experts of one layer, by logical id. A context manager: at its end files are closed."""

    where: str  # for messages
    count: int
    biases: bool  # load gives the layer biases too

    def load(self, layer: "_core.MoELayer", slot: int, expert: int) -> None: ...

    def will_need(self, expert: int) -> None:
        """Files may be read ahead."""

    def forget(self) -> None:
        """What was read so far need not stay in memory."""

    def __enter__(self) -> "Experts": ...

    def __exit__(self, *_) -> None: ...


def count_consecutive(present: Iterable[bool]) -> int:
    """Ids from 0 on; `present` may be endless."""
    count = 0
    for there in present:
        if not there:
            break
        count += 1
    return count


def layers_in(names: Iterable[str]) -> str:
    """Which layers have experts among these tensors, for messages."""
    found = {int(match[1]) for name in names if (match := re.search(r"(?:layers|blk)\.(\d+)\..*exp(?:ert)?s\b", name))}
    if not found:
        return "no tensors of experts"
    return f"experts of the layers {min(found)}..{max(found)}"
