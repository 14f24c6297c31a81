"""Builds a wheel into a folder (dist): for every Python 3.10+ found here with its headers, or for this one only.

The extension itself is on the stable ABI; what the interpreters differ in is the small nanobind backend, of which the
wheel holds one per interpreter. The wheel is tagged with exactly those.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_STAGE = Path("build/wheel")
_PLATFORM = "manylinux_2_28_x86_64"
_FACTS = (
    "import os, sys, sysconfig as s; p = s.get_path('include');"
    "print(sys.implementation.name, s.get_config_var('SOABI'), os.path.exists(p + '/Python.h'))"
)


def _tag(interpreter: Path) -> str | None:
    """`cp312`, or None for what cannot be built for: too old, free-threaded, not CPython, no headers, not runnable."""
    result = subprocess.run([interpreter, "-c", _FACTS], capture_output=True, text=True, check=False)
    match = re.match(r"cpython cpython-3(\d+)-\S+ True$", result.stdout.strip())
    return f"cp3{match[1]}" if match and int(match[1]) >= 10 else None


def interpreters() -> dict[str, Path]:
    """Tag -> interpreter; the running one wins, then those on PATH, then those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [Path(sys.executable)]
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        candidates += sorted(Path(folder).glob("python3.[0-9][0-9]")) if folder else []
    candidates += sorted(pyenv.glob("3.*/bin/python3"))
    found: dict[str, Path] = {}
    for candidate in candidates:
        tag = _tag(candidate)
        if tag:
            found.setdefault(tag, candidate)
    return dict(sorted(found.items()))


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("dist"), help="folder; wheels that are in it go")
    parser.add_argument("--only-this-python", action="store_true")
    parser.add_argument("--build-dir", help="a build tree to use again, made with KT_DEV=ON")
    given = parser.parse_args()
    found = interpreters()
    if given.only_this_python:
        found = {tag: path for tag, path in found.items() if path == Path(sys.executable)}
    print("Pythons:", ", ".join(f"{tag} ({path})" for tag, path in found.items()))
    shutil.rmtree(_STAGE, ignore_errors=True)
    options = [f"-Ccmake.define.KT_BACKEND_PYTHONS={';'.join(map(str, found.values()))}"]
    if given.build_dir:
        options += [f"-Cbuild-dir={given.build_dir}", "-Ccmake.define.KT_DEV=ON"]
    _python("pip", "wheel", ".", "--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={_STAGE}", *options)
    (built,) = _STAGE.glob("*.whl")
    # Fails where an object needs a symbol version that the tag does not allow.
    _python("auditwheel", "repair", "--strip", f"--plat={_PLATFORM}", f"--wheel-dir={_STAGE / 'tagged'}", str(built))
    (repaired,) = (_STAGE / "tagged").glob("*.whl")
    tags = ".".join(found)
    _python("wheel", "tags", "--remove", f"--python-tag={tags}", f"--abi-tag={tags}", str(repaired))
    (wheel,) = (_STAGE / "tagged").glob("*.whl")
    given.to.mkdir(parents=True, exist_ok=True)
    for old in given.to.glob("*.whl"):
        old.unlink()
    target = Path(shutil.move(wheel, given.to / wheel.name))
    print(f"{target}: {target.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
