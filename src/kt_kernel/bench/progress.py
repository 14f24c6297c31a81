"""A progress bar on stderr, so that stdout stays for results."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """Counts the points of a run and names the current one. Use as a context manager."""

    def __init__(self, total: int):
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        console = Console(stderr=True)
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=total)

    def say(self, text: str) -> None:
        """What is going on now."""
        self._bar.update(self._task, description=text)

    def done(self) -> None:
        self._bar.advance(self._task)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()
