"""A progress bar on stderr, for loads that take more than a second."""

import time
from collections.abc import Callable

_PATIENCE_S = 1.0

Report = Callable[[int, int], None]  # done, total


class Progress:
    """Counts experts. With `report`, tells it instead of drawing. Use as a context manager."""

    def __init__(self, label: str, total: int, report: Report | None = None):
        self._label, self._total, self._report = label, total, report
        self._done, self._start = 0, time.monotonic()
        self._bar = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int = 1) -> None:
        self._done += count
        if self._report is not None:
            self._report(self._done, self._total)
            return
        if self._bar is None and time.monotonic() - self._start > _PATIENCE_S:
            self._bar = _make_bar(self._label, self._total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)


def _make_bar(label: str, total: int):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task(label, total=total)
    bar.start()
    return bar
