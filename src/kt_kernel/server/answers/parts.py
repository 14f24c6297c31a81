"""What an answer is made of."""

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Call:
    """A call of a tool; arguments are JSON text."""

    name: str
    arguments: str
    id: str


Part = Content | Reasoning | Call
Schemas = Mapping[str, Mapping[str, object]]  # name of a tool -> the schema of its parameters


class Parser(Protocol):
    def feed(self, text: str) -> Sequence[Part]:
        """What is certain once this text has come too."""

    def end(self) -> Sequence[Part]:
        """The rest: nothing comes any more."""


class Plain:
    """Answers without any form."""

    def feed(self, text: str) -> Sequence[Part]:
        return [Content(text)] if text else []

    def end(self) -> Sequence[Part]:
        return []


def new_id(form: str = "call_") -> str:
    """``short``: nine letters and digits, which is what the templates of Mistral take."""
    if form == "short":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return form + secrets.token_hex(12)


def held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that could become one of ``markers``."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of ``markers`` begins, and which it is."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, key=lambda pair: (pair[0], -len(pair[1]))) if found else None
