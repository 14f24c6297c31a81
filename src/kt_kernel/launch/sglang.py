"""The command line of SGLang for a model whose experts are on the CPU, and which of its options are known here."""

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata

import kt_kernel
from kt_kernel import cached_json
from kt_kernel.errors import UserError

MODULE = "sglang.launch_server"
# Importing SGLang takes half a minute on a slow disk.
_HELP_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Launch:
    """A command, what it runs with beside this process's environment, and options that were left out."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    left_out: tuple[str, ...] = ()  # KT options that this SGLang does not know

    def as_shell(self) -> str:
        """For a shell: variables first, everything quoted."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])


def make_launch(
    options: Iterable[tuple[str, object]], others: Iterable[str], environment: Mapping[str, str], known: frozenset[str]
) -> Launch:
    """`options`: (name without dashes, value); True is a switch, None and False are left out. `others` go last, as they
    are. `known`: SGLang's options; empty: not known, nothing is left out."""
    command = [sys.executable, "-m", MODULE]
    left_out = []
    for name, value in options:
        option = f"--{name}"
        if value is None or value is False:
            continue
        if known and name.startswith("kt-") and option not in known:
            left_out.append(option)
            continue
        command.append(option)
        if value is not True:
            command += [str(item) for item in (value if isinstance(value, list | tuple) else [value])]
    return Launch((*command, *others), dict(environment), tuple(left_out))


def known_options() -> frozenset[str]:
    """Every option of the installed SGLang, plugins' included; asked once for each version and kept.

    UserError where SGLang cannot tell: then it would not start either.
    """
    from kt_kernel.folders import cache_folder

    versions = f"{_version('sglang')} {_version('sglang-kt')} {kt_kernel.__version__} {sys.executable}"
    path = cache_folder() / "sglang" / f"{hashlib.sha256(versions.encode()).hexdigest()[:16]}.json"
    kept = cached_json.read(path)
    if kept.get("versions") == versions and isinstance(kept.get("options"), list):
        return frozenset(kept["options"])
    found = _asked()
    cached_json.write(path, {"versions": versions, "options": sorted(found)})
    return found


def start(launch: Launch) -> None:
    """Becomes SGLang: its exit code and signals are those of this process from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(launch.command[0], list(launch.command), {**os.environ, **launch.environment})


def _asked() -> frozenset[str]:
    command = [sys.executable, "-m", MODULE, "--help"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_HELP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(
            "'{command}' gave no answer in {seconds} s", command=shlex.join(command), seconds=f"{_HELP_TIMEOUT_S:.0f}"
        ) from None
    found = frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]*", said.stdout))
    if said.returncode != 0 or not found:
        reason = (said.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError("SGLang does not start: {reason}; 'kt doctor' tells which versions work", reason=reason)
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
