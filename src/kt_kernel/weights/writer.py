"""Writes the files that canonical.py reads: all of a layer, or nothing.

A file is made under a temporary name in the same folder, locked while its writer lives, and renamed once it is on the
disk. What a killed writer leaves behind is unlocked, and the next writer in that folder removes it.
"""

import errno
import fcntl
import json
import os
from pathlib import Path

import numpy as np

from kt_kernel.weights.canonical import Coded, file_name, metadata, tensor_name, tensors_of
from kt_kernel.weights.experts import PROJECTIONS, Sizes

_ALIGNMENT = 64


def _layout(layer_idx: int, weight_format: str, count: int, sizes: Sizes) -> tuple[bytes, dict[str, int], int]:
    """The head of the file, tensor -> where it starts in the file, bytes of the file."""
    tensors = {
        tensor_name(layer_idx, projection, expert, tensor.kind): tensor
        for expert in range(count)
        for projection in PROJECTIONS
        for tensor in tensors_of(weight_format, *sizes.shape(projection))
    }
    fields: dict[str, object] = {"__metadata__": metadata(weight_format)}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].kind != "scale"):
        fields[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.bytes]}
        at += tensor.bytes
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    begin = 8 + len(header)
    starts = {name: begin + fields[name]["data_offsets"][0] for name in tensors}
    return len(header).to_bytes(8, "little") + header, starts, begin + at


class LayerWriter:
    """write() every expert, in any order. A context manager: the file appears at its end, if nothing was raised."""

    def __init__(self, folder: Path, layer_idx: int, weight_format: str, count: int, sizes: Sizes):
        self.path = folder / file_name(layer_idx)
        self._temporary = folder / (self.path.name + ".tmp")
        self._layer_idx, self._format, self._sizes, self._missing = layer_idx, weight_format, sizes, set(range(count))
        self._head, self._starts, self._bytes = _layout(layer_idx, weight_format, count, sizes)
        self._fd = -1

    def write(self, expert: int, coded: list[Coded]) -> None:
        for projection, arrays in zip(PROJECTIONS, coded, strict=True):
            tensors = tensors_of(self._format, *self._sizes.shape(projection))
            for tensor, array in zip(tensors, arrays, strict=True):
                if array.shape != tensor.shape:
                    raise ValueError(f"{projection} {tensor.kind} has shape {array.shape}, not {tensor.shape}")
                self._write_at(self._starts[tensor_name(self._layer_idx, projection, expert, tensor.kind)], array)
        self._missing.discard(expert)

    def __enter__(self) -> "LayerWriter":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
            self._reserve()
            self._write_at(0, np.frombuffer(self._head, np.uint8))
        except BaseException as error:
            self._discard()
            raise self._explained(error) from None
        return self

    def __exit__(self, kind, error, _) -> None:
        if error is not None:
            self._discard()
            if isinstance(error, OSError) and error.filename is None:
                raise self._explained(error) from None
            return
        try:
            if self._missing:
                raise ValueError(f"{self.path}: expert {min(self._missing)} was not written")
            os.fsync(self._fd)
            os.rename(self._temporary, self.path)
            os.close(self._fd)
            self._fd = -1
            _sync_folder(self.path.parent)
        except BaseException as error:
            self._discard()
            raise self._explained(error) from None

    def _open(self) -> None:
        _remove_leftovers(self.path.parent)
        self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Between open and lock another writer may have finished and renamed this very file.
        if not (_lock(self._fd) and _is_at(self._fd, self._temporary)):
            os.close(self._fd)
            self._fd = -1
            raise OSError(errno.EBUSY, "another process writes this layer; wait for it")
        os.ftruncate(self._fd, 0)

    def _reserve(self) -> None:
        """A full disk shows here, not after an hour of work."""
        try:
            os.posix_fallocate(self._fd, 0, self._bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    def _write_at(self, at: int, array: np.ndarray) -> None:
        data = memoryview(np.ascontiguousarray(array)).cast("B")
        while data:
            written = os.pwrite(self._fd, data, at)
            at, data = at + written, data[written:]

    def _discard(self) -> None:
        if self._fd >= 0:
            if _is_at(self._fd, self._temporary):
                self._temporary.unlink()
            os.close(self._fd)
            self._fd = -1

    def _explained(self, error: BaseException) -> BaseException:
        if not isinstance(error, OSError):
            return error
        gigabytes = self._bytes / 1e9
        ways_out = {
            errno.ENOSPC: f"the layer needs {gigabytes:.3g} GB; free some space or choose another folder",
            errno.EDQUOT: f"the layer needs {gigabytes:.3g} GB; free some space or choose another folder",
            errno.EACCES: "choose a folder that you may write to",
            errno.EROFS: "choose a folder that you may write to",
        }
        text = "; ".join(filter(None, [error.strerror or str(error), ways_out.get(error.errno or 0)]))
        return OSError(error.errno, f"cannot write converted weights: {text}", str(self.path))


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # File systems without locks: leftovers stay, two writers of one layer are the user's problem.
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob("layer-*.safetensors.tmp"):
        try:
            fd = os.open(leftover, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if _lock(fd) and _is_at(fd, leftover):
                leftover.unlink()
        finally:
            os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
