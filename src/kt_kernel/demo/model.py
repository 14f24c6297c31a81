"""The demo model in the cache folder: made when it is first asked for, looked at every time, made again if damaged."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kt_kernel.demo.errors import DemoError
from kt_kernel.demo.source import SHA256, Say, sha256_of, source_file
from kt_kernel.folders import cache_folder

NAME = "SmolLM2-135M-Instruct-MoE"
# Raised when other bytes are written: what older versions made is then made again.
VERSION = 1
CHECKSUMS = "kt-demo.json"
_HEAD_BYTES = 1 << 20  # of a file, looked at every time: all of the small ones, and names and shapes of the weights


def demo_model(
    folder: "str | os.PathLike[str] | None" = None, *, every_byte: bool = False, say: Say | None = None
) -> Path:
    """The folder with a Mixtral checkpoint (430 MB) that answers as SmolLM2-135M-Instruct does, by 8 of 16 experts.

    Without a folder it is in the cache. Sizes and the first megabyte of each file are checked against what was written,
    with `every_byte` all of it. `say` gets lines about what takes time; without it they go to stderr.
    DemoError, OSError: it could not be made; nothing half-made stays.
    """
    path = Path(folder) if folder is not None else usual_path()
    say = say or (lambda line: print(f"kt: {line}", file=sys.stderr))
    if problem(path, every_byte) is None:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f".{path.name}.lock"), say):
        wrong = problem(path, every_byte)  # another process may have made it meanwhile
        if wrong is None:
            return path
        if path.exists() and not (path / CHECKSUMS).is_file() and (not path.is_dir() or any(path.iterdir())):
            raise DemoError(f"{path} is something else than the demo model: give a folder that is empty or not there")
        say(f"making the demo model in {path} (once: {wrong})")
        _make(path, say)
    return path


def usual_path() -> Path:
    """Where it is, or will be, in the cache."""
    return cache_folder() / "models" / NAME


def problem(path: Path, every_byte: bool = False) -> str | None:
    """Why the model is not there as it was written; None: it is."""
    try:
        said = json.loads((path / CHECKSUMS).read_text())
        if (said["version"], said["source"]) != (VERSION, SHA256):
            return "another version made it"
        for name, file in said["files"].items():
            found = path / name
            if found.stat().st_size != file["bytes"] or _head(found) != file["head"]:
                return f"{name} is damaged"
            if every_byte and sha256_of(found) != file["sha256"]:
                return f"{name} is damaged"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing" if path.is_dir() else "it is not there"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS} is damaged"
    return None


def _make(path: Path, say: Say) -> None:
    """Under another name beside it, then renamed. The lock is held: what has that name, a killed process left."""
    from kt_kernel.demo.checkpoint import write_checkpoint

    work = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    try:
        (work / "model").mkdir(parents=True)
        with source_file(work, say) as source:
            write_checkpoint(source, work / "model")
        files = {
            file.name: {"bytes": file.stat().st_size, "head": _head(file), "sha256": sha256_of(file)}
            for file in sorted((work / "model").iterdir())
        }
        text = json.dumps({"version": VERSION, "source": SHA256, "files": files}, indent=1) + "\n"
        (work / "model" / CHECKSUMS).write_text(text)
        if path.exists():
            path.rename(work / "damaged")
        (work / "model").rename(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _head(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """One process at a time. The file stays: removing it would let a third in beside a second that waits."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process makes the demo model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
