"""Files read through memory maps: no second copy of the weights, and pages that are given back when told."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np


class MappedFile:
    """A file that is not empty, mapped read-only. Arrays are views and keep the mapping alive.

    A file that someone cuts short while it is mapped ends the process (SIGBUS), as with every reader that maps.
    """

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            self.path, self.size = path, os.fstat(file.fileno()).st_size
            if self.size == 0:
                raise ValueError(f"{path} is empty; copy or download it again")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def array(self, begin: int, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        """A view, or a copy where the file does not align the elements. The caller has checked the bounds."""
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0:
            return np.empty(shape, dtype)
        view = np.frombuffer(self._map, dtype, count, begin).reshape(shape)
        return view if view.flags.aligned else view.copy()

    def will_need(self, begin: int, end: int) -> None:
        """The kernel starts to read; nobody waits."""
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_WILLNEED, start, end - start)

    def forget(self) -> None:
        """Pages of the file stop to count as this process's memory; the page cache keeps them as long as it likes."""
        self._map.madvise(mmap.MADV_DONTNEED)


class MissingTensorError(KeyError):
    """A tensor that a file should have. Says where it was looked for and what to do."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


class MappedTensors:
    """Tensors by name, in files that are mapped when one of theirs is read. A context manager: at its end the mappings
    are dropped.

    Subclasses fill `_files` and tell by `entry(name).end` where a tensor ends in its file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._files: dict[str, Path] = {}
        self._maps: dict[Path, MappedFile] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.forget()
        self._maps.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def file_of(self, name: str) -> Path:
        if name not in self._files:
            raise MissingTensorError(f"{self.path} has no tensor {name!r}; is the download or the conversion complete?")
        return self._files[name]

    def forget(self) -> None:
        for mapped in self._maps.values():
            mapped.forget()

    def _mapped(self, name: str) -> MappedFile:
        file = self.file_of(name)
        if file not in self._maps:
            self._maps[file] = MappedFile(file)
        if self._maps[file].size < self.entry(name).end:
            raise ValueError(f"{file} became shorter while it was read")
        return self._maps[file]
