"""What a check finds."""

from dataclasses import dataclass
from enum import Enum


class Status(str, Enum):
    OK = "ok"
    WARNING = "warning"  # works, and could be faster or safer
    ERROR = "error"  # does not work


@dataclass(frozen=True)
class Finding:
    """`cost` and `fix` belong to what is not ok: what is lost, and the command that mends it."""

    check: str  # its name, the same in every language
    title: str
    value: str
    status: Status = Status.OK
    cost: str = ""
    fix: str = ""
    details: tuple[str, ...] = ()  # for who wants to know more
