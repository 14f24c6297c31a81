"""Facts that take seconds to find out, kept in a file of the cache folder. A cache is never an error."""

import contextlib
import json
import os
from pathlib import Path


def read(path: Path) -> dict:
    """Empty where the file is missing or holds something else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write(path: Path, content: dict) -> None:
    """Whole or not at all. Where that is not possible, the facts are found out again the next time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
