"""Asks a measuring process (``side``)."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

from kt_kernel.bench.errors import SideError


class Client:
    """One long-lived process; ``client.call(...)`` becomes a method call on its side. Use as a context manager."""

    def __init__(
        self, side: str, *arguments: str, variant: str | None = None, environment: dict[str, str] | None = None
    ):
        self.name = side
        environment = os.environ | (environment or {})
        if variant is not None:
            environment["KT_KERNEL_CPU_VARIANT"] = variant
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in close())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kt_kernel.bench.side", side, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
        )

    def call(self, call: str, **arguments) -> dict:
        try:
            self._process.stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SideError(f"the process measuring '{self.name}' ended {self._how()}{self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise SideError(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        with suppress(BrokenPipeError):  # what a process that is gone did not read
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _how(self) -> str:
        code = self._process.wait()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        return f": {lines[-1]}" if lines else ""
