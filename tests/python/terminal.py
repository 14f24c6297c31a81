"""``kt`` under a pseudo-terminal, as a user sees it: keys go in, and a terminal emulator says what the screen shows."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pyte

COMMAND = "from kt_kernel.cli.main import main; main()"
ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"


def environment(home: Path, **changes: str) -> dict[str, str]:
    """That of a user who has just this home: no settings, no proxies, English."""
    dropped = ("KT_", "XDG_", "LC_", "HF_", "NO_COLOR", "TERM", "COLUMNS", "LINES", "http", "HTTP", "all_proxy")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "HOME": str(home), "LANG": "C.UTF-8", "TERM": "xterm-256color", **changes}


class _Screen(pyte.HistoryScreen):
    """Answers what programs ask terminals, as where the cursor is."""

    answer = staticmethod(lambda data: None)

    def write_process_input(self, data: str) -> None:
        self.answer(data)


class Terminal:
    def __init__(self, arguments: list[str], env: dict[str, str], columns: int = 80, rows: int = 24):
        self.child = pexpect.spawn(
            sys.executable, ["-c", COMMAND, *arguments], env=env, dimensions=(rows, columns), timeout=1, echo=True
        )
        self.raw = b""
        self._screen = _Screen(columns, rows, history=2000, ratio=0.5)
        self._screen.answer = self.child.send
        self._stream = pyte.ByteStream(self._screen)

    def type(self, text: str, end: str = ENTER) -> None:
        self.child.send(text + end)

    def paste(self, text: str) -> None:
        self.child.send(f"\x1b[200~{text}\x1b[201~")

    @property
    def screen(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def lines(self) -> list[str]:
        """All that was printed: what scrolled away, and the screen."""
        gone = ["".join(row[column].data for column in range(self._screen.columns)).rstrip() for row in self._top]
        return gone + self.screen

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str, seconds: float = 30.0, times: int = 1) -> None:
        end = time.monotonic() + seconds
        while self.text.count(text) < times:
            assert self._read(end), f"no {text!r} in {seconds} s, or before the end; the terminal shows:\n{self.text}"

    def wait_for_output(self, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        assert self.raw or self._read(end), "the terminal stays empty"

    def exit_code(self, seconds: float = 30.0) -> int:
        """Waits for the end. A signal that killed it is negative."""
        end = time.monotonic() + seconds
        while self._read(end):
            pass
        assert time.monotonic() < end, f"still running; the terminal shows:\n{self.text}"
        self.child.wait()
        return self.child.exitstatus if self.child.signalstatus is None else -self.child.signalstatus

    @property
    def _top(self) -> list:
        return list(self._screen.history.top)

    def _read(self, end: float) -> bool:
        """Takes what has come; False at the end of the program or of the time."""
        while time.monotonic() < end:
            try:
                data = self.child.read_nonblocking(65536, timeout=0.05)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                return False
            self.raw += data
            self._stream.feed(data)
            return True
        return False


@contextlib.contextmanager
def terminal(home: Path, *arguments: str, columns: int = 80, rows: int = 24, **changes: str) -> Iterator[Terminal]:
    started = Terminal(list(arguments), environment(home, **changes), columns, rows)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.child.pid, signal.SIGKILL)
        started.child.close()
