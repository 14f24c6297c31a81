"""What a conversion shows on stderr: a bar with the time left on a terminal, a line for each layer elsewhere."""

import sys
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kt_kernel.convert.folder import Record
from kt_kernel.convert.quality import relative
from kt_kernel.weights.experts import PROJECTIONS

_SHOWN = 5  # layers and tensors of the table


class Display:
    """An Observer. Use as a context manager."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("experts"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
        )
        self._terminal = console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=not self._terminal)
        self._task = None
        self._done = self._total = 0
        self._begun = time.monotonic()

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        self._say(text)

    def begin(self, what: str, total: int) -> None:
        self._done, self._total, self._begun = 0, total, time.monotonic()
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=total)

    def advance(self, count: int) -> None:
        self._done += count
        self._bar.advance(self._task, count)

    def finished(self, layer_idx: int, record: Record) -> None:
        errors = ", ".join(f"{p} {relative(*record['quality']['sums'][p]):.2%}" for p in PROJECTIONS)
        text = f"layer {layer_idx}: {record['seconds']:.1f} s, errors {errors}"
        if not self._terminal and self._done:
            left = (time.monotonic() - self._begun) / self._done * (self._total - self._done)
            text += f"; {self._done} of {self._total} experts, {timedelta(seconds=round(left))} left"
        self._say(text)

    def _say(self, text: str) -> None:
        if self._terminal:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def show_quality(report: dict[str, object]) -> None:
    """A short table on stdout; all of it is in kt-quality.json."""
    table = Table(title=f"Errors of {report['method']} against the source (scales: {report['scales']})")
    for column in ("", *PROJECTIONS, "all"):
        table.add_column(column, justify="left" if not column else "right")
    layers = sorted(report["layers"].items(), key=lambda item: -item[1]["all"])[:_SHOWN]
    rows = [("all layers", report["error"]), *((f"layer {layer}", errors) for layer, errors in layers)]
    for name, errors in rows:
        table.add_row(name, *(f"{errors[column]:.2%}" for column in (*PROJECTIONS, "all")))
    console = Console()
    console.print(table)
    worst = [
        f"layer {tensor['layer']} {tensor['projection']} of expert {tensor['expert']} {tensor['error']:.2%}"
        for tensor in report["worst"][:_SHOWN]
    ]
    console.print("worst tensors: " + ", ".join(worst), markup=False, highlight=False)
