"""Versions of the packages that kt-kernel works with, without importing any of them."""

import re
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from kt_kernel.machine import system


@dataclass(frozen=True)
class Package:
    """`least` and `below`: what kt-kernel asks for; `tested`: what its tests run with."""

    name: str
    least: str
    tested: str
    below: str = ""
    needed_by: str = ""  # empty: by everything


# pyproject.toml and constraints.txt say the same; a test compares.
PACKAGES = (
    Package("numpy", "1.24", "2.4.6"),
    Package("torch", "2.4", "2.13.0"),
    Package("transformers", "5.21", "5.22.2", "6", "kt run, kt verify MODEL"),
    Package("huggingface_hub", "", "2.4.0", "", "kt model download"),
    Package("sglang", "0.5.17", "0.5.23", "", "kt run on a GPU"),
)

# Distributions under which SGLang is found: its own, and the fork that the released kt-kernel came with.
_SGLANG = ("sglang", "sglang-kt")


@dataclass(frozen=True)
class Installed:
    version: str
    pins: dict[str, str]  # other packages that it wants in exactly this version


def installed() -> dict[str, Installed]:
    """By the names of PACKAGES."""
    found = {}
    for package in PACKAGES:
        for name in _SGLANG if package.name == "sglang" else (package.name,):
            try:
                requires = metadata.requires(name) or []
                found[package.name] = Installed(metadata.version(name), pins_of(requires))
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def pins_of(requires: list[str]) -> dict[str, str]:
    """NAME==VERSION of the packages in the table, without those of extras."""
    names = {package.name for package in PACKAGES}
    pins = {}
    for line in requires:
        match = re.match(r"([\w.-]+)\s*==\s*([\w.+!]+)\s*(;.*)?$", line)
        if match and match.group(1).replace("-", "_") in names and "extra" not in (match.group(3) or ""):
            pins[match.group(1).replace("-", "_")] = match.group(2)
    return pins


def sglang_takes_kt() -> bool | None:
    """Whether SGLang has our options; None where it is not installed."""
    folder = _folder("sglang")
    if folder is None:
        return None
    return "kt_weight_path" in system.read(folder / "srt" / "server_args.py")


def torch_cuda() -> str | None:
    """As torch/version.py has it: "13.0", or None of a build for the CPU."""
    folder = _folder("torch")
    text = system.read(folder / "version.py") if folder else ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def order(version: str) -> tuple[int, ...]:
    """To compare by: the numbers in front, so that 2.13.0+cpu is 2.13.0 and 5.21rc1 is 5.21."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else [0]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _folder(name: str) -> Path | None:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None
