"""How commands print: facts on stdout, all else on stderr, and no colours or frames without a terminal."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

import typer

from kt_kernel import env, settings
from kt_kernel.cli.language import t
from kt_kernel.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 10_000  # columns where nobody reads along: nothing is cut or broken


def is_terminal(stream: str = "stdout") -> bool:
    """Whether somebody reads this stream along ("stdin": may be asked)."""
    found = getattr(sys, stream)
    return found is not None and found.isatty()  # None: it was closed before Python started


def console(stream: str = "stdout") -> "Console":
    from rich.console import Console

    width = None if is_terminal(stream) else _WIDE
    return Console(file=getattr(sys, stream), width=width, no_color=not _colors(), highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """On stdout. Columns whose cells are all numbers, or None, are set to the right; None is an empty cell, and
    a Text of rich keeps its colour.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = [list(row) for row in rows]
    frame = box.SIMPLE_HEAD if is_terminal() else None
    shown = Table(box=frame, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        numbers = all(isinstance(row[index], int | float | None) for row in rows)
        # Names are there to be copied: they are not broken.
        shown.add_column(name, justify="right" if numbers and rows else "left", overflow="fold", no_wrap=index == 0)
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else Text("" if cell is None else str(cell)) for cell in row))
    out = console()
    with out.capture() as text:
        if title is not None:
            out.print(Text(title))  # a title of the table would be broken at its width
        out.print(shown)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in text.get().splitlines()))


def facts(pairs: Iterable[tuple[str, object]]) -> None:
    """On stdout: names and values, a line each."""
    from rich.cells import cell_len  # a Chinese character has two columns

    pairs = list(pairs)
    width = max((cell_len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"  {name}:{' ' * (width - cell_len(name) + 2)}{value}")


def print_json(value: object) -> None:
    """The only thing on stdout of a command with --json."""
    print(json.dumps(value, indent=1, ensure_ascii=False, default=str))


def three_digits(value: float) -> str:
    """A measured number, without an exponent."""
    return f"{float(f'{value:.3g}'):.15g}"


def examples(*lines: str) -> str:
    """The epilog of a command's help."""
    return "\b\n" + "\n".join([t("Examples:"), *(f"  {line}" for line in lines)])


def note(command: str, message: str) -> None:
    """One line on stderr."""
    print(f"kt {command}: {message}", file=sys.stderr)


def fail(command: str, message: str) -> NoReturn:
    """One line on stderr, and exit code 1."""
    note(command, " ".join(message.split()))
    raise typer.Exit(1)


def _colors() -> bool:
    if env.no_color():
        return False
    try:
        return settings.get("general.color")
    except UserError:
        return True
