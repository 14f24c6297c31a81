"""The command `kt` in this process, or in one of its own."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from kt_kernel.cli.main import main

KT = [sys.executable, "-c", "from kt_kernel.cli.main import main; main()"]


class Said(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> dict:
        assert self.code in (0, 1), self
        return json.loads(self.out)

    def line(self) -> str:
        """The one line of an error; nothing else was said."""
        assert self.out == ""
        assert len(self.err.splitlines()) == 1, self.err
        return self.err.strip()


def run(capfd, *arguments) -> Said:
    """As the entry point does, without a terminal."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    said = capfd.readouterr()
    assert "\x1b" not in said.out + said.err
    return Said(end.value.code, said.out, said.err)


def run_alone(*arguments, **variables: str) -> Said:
    environment = {**os.environ, **variables}
    done = subprocess.run([*KT, *map(str, arguments)], env=environment, capture_output=True, text=True)
    return Said(done.returncode, done.stdout, done.stderr)
