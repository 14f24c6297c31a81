"""Writes a file that is there whole or not at all.

It is made under a temporary name in the same folder, locked while its writer lives, and renamed once it is on the disk.
What a killed writer leaves behind is unlocked, and the next writer in that folder removes it.
"""

import errno
import fcntl
import os
from pathlib import Path


class WholeFile:
    """A context manager: the file appears at its end, if nothing was raised. `fd` may be written to in any order.

    `what` names the content in messages; `leftovers` matches the temporary names of such files in the folder.
    An OSError with EBUSY: another process, or thread, writes the same file now.
    """

    def __init__(self, path: Path, size: int, what: str, leftovers: str):
        self.path, self.fd = path, -1
        self._size, self._what, self._leftovers = size, what, leftovers
        self._temporary = path.with_name(path.name + ".tmp")

    def write_at(self, at: int, data: bytes | memoryview) -> None:
        left = memoryview(data).cast("B")
        while left:
            written = os.pwrite(self.fd, left, at)
            at, left = at + written, left[written:]

    def __enter__(self) -> "WholeFile":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
            self._reserve()
        except BaseException as error:
            self._discard()
            raise self._explained(error) from None
        return self

    def __exit__(self, kind, error, _) -> None:
        if error is not None:
            self._discard()
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                raise self._explained(error) from None
            return
        try:
            os.fsync(self.fd)
            os.rename(self._temporary, self.path)
            os.close(self.fd)
            self.fd = -1
            _sync_folder(self.path.parent)
        except BaseException as error:
            self._discard()
            raise self._explained(error) from None

    def _open(self) -> None:
        remove_leftovers(self.path.parent, self._leftovers)
        self.fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Between open and lock another writer may have finished and renamed this very file.
        if not (_lock(self.fd) and _is_at(self.fd, self._temporary)):
            os.close(self.fd)
            self.fd = -1
            raise OSError(errno.EBUSY, "another process writes this file; wait for it")
        os.ftruncate(self.fd, 0)

    def _reserve(self) -> None:
        """A full disk shows here, not after an hour of work."""
        try:
            os.posix_fallocate(self.fd, 0, self._size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    def _discard(self) -> None:
        if self.fd >= 0:
            if _is_at(self.fd, self._temporary):
                self._temporary.unlink()
            os.close(self.fd)
            self.fd = -1

    def _explained(self, error: BaseException) -> BaseException:
        if not isinstance(error, OSError):
            return error
        space = f"it needs {self._size / 1e9:.3g} GB; free some space or choose another folder"
        writable = "choose a folder that you may write to"
        ways_out = {
            errno.ENOSPC: space,
            errno.EDQUOT: space,
            errno.EFBIG: f"it needs {self._size / 1e9:.3g} GB; raise 'ulimit -f' or choose another folder",
            errno.EACCES: writable,
            errno.EPERM: writable,
            errno.EROFS: writable,
            errno.EEXIST: "choose a folder, this is none",
            errno.ENOTDIR: "choose a folder, this is none",
        }
        text = "; ".join(filter(None, [error.strerror or str(error), ways_out.get(error.errno or 0)]))
        return OSError(error.errno, f"cannot write {self._what}: {text}", str(self.path))


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


def remove_leftovers(folder: Path, pattern: str) -> None:
    """What killed writers left behind. Files of writers that are alive are locked, and stay."""
    for leftover in folder.glob(pattern):
        try:
            fd = os.open(leftover, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone, or another user's
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
