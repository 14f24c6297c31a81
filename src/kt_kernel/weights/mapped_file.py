"""Files read through memory maps: no second copy of the weights, and pages that are given back when told."""

import mmap
import os
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
