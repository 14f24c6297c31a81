"""Processes of SGLang that are started, asked, frozen and ended: an engine behind ``side.py``, or its server."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SIDE = Path(__file__).with_name("side.py")
_END_SECONDS = 20


class EngineError(RuntimeError):
    """An engine did not start, answer or end; the message has its reason and names its log."""


@dataclass(frozen=True)
class Place:
    """Where an engine and a kt_kernel live: an interpreter, and variables it is started with."""

    python: str = sys.executable
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, **self.variables, **more}


class Process:
    """A process with whatever it starts: a group of its own, so that all of it can be frozen and ended."""

    def __init__(self, place: Place, arguments: list[str], log: Path, variables: dict[str, str], **pipes):
        self.log = log
        with open(log, "w") as file:
            self.popen = subprocess.Popen(
                [place.python, *arguments],
                env=place.environment(**variables),
                stderr=file,
                start_new_session=True,
                text=True,
                **{"stdout": file, **pipes},
            )

    def members(self) -> list[int]:
        """Processes of the group that still run."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _group(pid) == self.popen.pid]

    def freeze(self) -> None:
        """Schedulers of idle engines poll: they would take CPU time from the one that is measured."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self.thaw()
        self._signal(signal.SIGKILL)
        self.popen.wait()

    def wait_for_end(self, seconds: float = _END_SECONDS) -> list[int]:
        """What is left of the group after some time; [] is good."""
        end = time.monotonic() + seconds
        self.popen.poll()
        while (left := self.members()) and time.monotonic() < end:
            time.sleep(0.1)
            self.popen.poll()
        return left

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "its log is empty"

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


class Engine(Process):
    """sglang.Engine; ``call`` becomes a method call on its side."""

    def __init__(self, place: Place, options: dict, log: Path, **variables: str):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        super().__init__(place, [str(SIDE), json.dumps(options)], log, variables, **pipes)

    def wait_until_up(self, seconds: float) -> dict:
        return self._answer(seconds)

    def call(self, call: str, seconds: float, **arguments):
        try:
            self.popen.stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"the engine has ended: {self.last_words()} ({self.log})") from None
        return self._answer(seconds)

    def stop(self) -> None:
        """In order first; what does not end by itself is killed."""
        with suppress(EngineError, subprocess.TimeoutExpired, OSError):
            self.call("stop", _END_SECONDS)
            self.popen.stdin.close()
            self.popen.wait(_END_SECONDS)
        self.kill()
        self.popen.stdout.close()

    def _answer(self, seconds: float):
        ready, _, _ = select.select([self.popen.stdout], [], [], seconds)
        if not ready:
            raise EngineError(f"no answer within {seconds:.0f} s: {self.last_words()} ({self.log})")
        line = self.popen.stdout.readline()
        if not line:
            raise EngineError(f"the engine has ended: {self.last_words()} ({self.log})")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{answer['error']} ({self.log})")
        return answer["ok"]


def _group(pid: int) -> int | None:
    """The process group, or None of one that has ended, a zombie among them."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state in "ZX" else int(group)
