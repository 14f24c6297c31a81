"""Small YAML files that people edit too: read whole, replaced whole, changed by one process at a time."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kt_kernel.errors import UserError


class YamlFileError(UserError):
    """The file cannot be read or written; the message names it and the way out."""


def read(path: Path) -> dict:
    """What the file says; {} where there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise YamlFileError("cannot read {path}: {reason}", path=path, reason=error.strerror) from None
    import yaml  # 15 ms, which most runs of kt do without

    try:
        found = yaml.safe_load(content.decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise YamlFileError(
            "{path} is no YAML ({reason}): correct it, or move it away", path=path, reason=reason
        ) from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise YamlFileError("{path} holds no names with values: correct it, or move it away", path=path)
    return found


@contextmanager
def changed(path: Path) -> Iterator[dict]:
    """What the file says, to be changed: it is written at the end, if nothing was raised, whole or not at all."""
    path = path.resolve()  # a link stays one
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise YamlFileError("cannot write {path}: {reason}", path=path, reason=error.strerror) from None
    try:
        with suppress(OSError):  # a file system without locks: two changes at once are the user's problem
            fcntl.flock(lock, fcntl.LOCK_EX)
        content = read(path)
        yield content
        _replace(path, content)
    except OSError as error:
        raise YamlFileError("cannot write {path}: {reason}", path=path, reason=error.strerror or error) from None
    finally:
        os.close(lock)


def _replace(path: Path, content: dict) -> None:
    import yaml

    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
