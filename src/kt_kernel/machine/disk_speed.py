"""How fast a disk is read, past the page cache."""

import mmap
import os
import tempfile
import time
from pathlib import Path

_BLOCK = 4 << 20
_OWN_BYTES = 128 << 20  # of the file that is written where there is none to read
_LEAST_BYTES = 32 << 20  # of a file that is worth reading
_SUFFIXES = (".safetensors", ".gguf", ".bin")


def existing(folder: Path) -> Path:
    """The folder, or the first one above it that is there."""
    folder = folder.expanduser().absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def measure_disk_gbps(folder: Path, seconds: float) -> float | None:
    """Of the largest weights in the folder, or of a file that is written there, read and removed."""
    found = existing(folder)
    files = [file for file in found.iterdir() if file.suffix in _SUFFIXES and file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    try:
        if largest is not None and largest.stat().st_size >= _LEAST_BYTES:
            return _read_gbps(largest, seconds)
        with tempfile.NamedTemporaryFile(dir=found, prefix=".kt-probe-") as file:
            block = os.urandom(_BLOCK)  # disks that compress must not gain
            for _ in range(_OWN_BYTES // _BLOCK):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return _read_gbps(Path(file.name), seconds)
    except OSError:
        return None


def _read_gbps(path: Path, seconds: float) -> float:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # tmpfs and some network file systems know no direct reads
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        buffer = mmap.mmap(-1, _BLOCK)  # aligned, as direct reads need it
        blocks = os.fstat(handle).st_size // _BLOCK
        done, start = 0, time.perf_counter()
        while done == 0 or time.perf_counter() - start < seconds:
            done += os.preadv(handle, [buffer], (done // _BLOCK) % max(1, blocks) * _BLOCK)
        return done / (time.perf_counter() - start) / 1e9
    finally:
        os.close(handle)
