"""Keeps the packed experts of a layer in a file, so that the next start copies them instead of packing again.

file      preamble | header | zeros up to a multiple of 2 MB | body, see cpp/moe/packed_file.h
preamble  magic (8 bytes) | layout version u64 | bytes of the header u64 | BLAKE2b-64 of all this and the header
header    JSON: what the body was made of and for (`_identity`), the logical experts in it, how many rows of their
          matrices share a scale, their checksums

A file is used if its identity is exactly the one that would be written now, its experts include those wanted, and every
checksum is right. Anything else is loaded from the source, and replaces the file. Experts are kept by logical id: the
map of physical slots may change from start to start.
"""

import contextlib
import errno
import json
import os
import stat
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from kt_kernel import _core, env
from kt_kernel.weights import gguf_file
from kt_kernel.weights.gguf_files import GgufFiles
from kt_kernel.weights.progress import Progress, Report
from kt_kernel.weights.tensor_files import MAX_HEADER, TensorFiles
from kt_kernel.weights.whole_file import WholeFile

# To be raised when the packed bytes of a format, or the body of the file, change.
LAYOUT_VERSION = 3

_MAGIC = b"\x89KTPACK\n"  # no text file begins so, and a transfer as text would show
_PREAMBLE = 32
_SUFFIX = ".ktpack"
_BATCH = 1 << 28  # bytes between two looks at Ctrl-C

Slots = dict[int, list[int]]  # logical expert -> physical slots
Pairs = list[tuple[int, int]]  # position in the file, physical slot


class _StaleError(Exception):
    """A sound file, made for something else."""


class _DamagedError(Exception):
    pass


class _Content(NamedTuple):
    begin: int  # of the body
    experts: list[int]
    scale_rows: list[list[int]]  # of each expert: gate, up, down
    checksums: list[list[int]]  # of each expert, part by part


class StoredLayer:
    """One layer of one source, in a folder of such files."""

    def __init__(
        self,
        folder: Path,
        layer: "_core.MoELayer",
        source: Path,
        layer_idx: int,
        opened: Path | TensorFiles | GgufFiles,
        count: int,
    ):
        """`opened` is what locate() found in `source`, `count` the number of its experts."""
        self._layer, self._layer_idx, self._opened, self._count = layer, layer_idx, opened, count
        self.path = folder / file_name(source, layer_idx, layer.format)
        self._shown = os.fsencode(self.path).decode(errors="replace")  # names may be no UTF-8
        self._identity = self._find_identity()

    def _find_identity(self) -> dict[str, object]:
        layer = self._layer
        return {
            "made_by": f"kt-kernel {_core.__version__}",
            "format": layer.format,
            "group": layer.group_size,
            "layer": self._layer_idx,
            "shape": [self._count, layer.hidden_size, layer.intermediate_size],
            "parts": [list(part) for part in layer.packed_parts],
            "sources": _sources(self._opened, self._layer_idx),
            "config": _config_digest(self._opened),
        }

    def read(self, slots: Slots, progress: Report | None = None) -> bool:
        """Fills the slots, or returns False: then they are to be loaded, whatever is in them."""
        if not self._identity["sources"]:
            return False
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # of a pipe: no waiting for a writer
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            _warn(f"cannot read {self._shown}: {error.strerror}; the weights are loaded from their source")
            return False
        try:
            self._fill(fd, self._open_content(fd), slots, progress)
        except _StaleError as error:
            if env.debug():
                print(f"[kt-kernel] {self._shown} is made again: {error}", file=sys.stderr)
            return False
        except _DamagedError as error:
            _warn(f"{self._shown} is not used and will be made again: {error}")
            return False
        finally:
            os.close(fd)
        return True

    def _open_content(self, fd: int) -> _Content:
        try:
            header, begin, size = _read_header(fd)
        except OSError as error:
            raise _DamagedError(f"it cannot be read ({error.strerror})") from None
        for field, value in self._identity.items():
            if header.get(field) != value:
                raise _StaleError(f"{field} was {header.get(field)}, is {value}")
        experts = header.get("experts")
        if not _are_experts(experts, self._count):
            raise _DamagedError("its list of experts is wrong")
        if size != begin + self._layer.packed_bytes(len(experts)):
            raise _DamagedError(f"it has {size} bytes, not {begin + self._layer.packed_bytes(len(experts))}")
        scale_rows = header.get("scale_rows")
        if not _are_scale_rows(scale_rows, len(experts)):
            raise _DamagedError("its list of rows that share a scale is wrong")
        return _Content(begin, experts, scale_rows, _checksums(header, len(experts), len(self._layer.packed_parts)))

    def _fill(self, fd: int, content: _Content, slots: Slots, progress: Report | None) -> None:
        position = {expert: index for index, expert in enumerate(content.experts)}
        missing = slots.keys() - position.keys()
        if missing:
            raise _StaleError(f"expert {min(missing)} is not in it")
        pairs = sorted((position[expert], slot) for expert, of_expert in slots.items() for slot in of_expert)
        with contextlib.suppress(OSError):  # advice; some file systems take none
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        with Progress(f"layer {self._layer_idx}", len(pairs), progress) as bar:
            for batch in self._batches(pairs):
                sums = [checksum for index, _ in batch for checksum in content.checksums[index]]
                try:
                    self._layer.read_packed(fd, "it", content.begin, len(content.experts), batch, sums)
                except (OSError, ValueError) as error:
                    raise _DamagedError(str(error)) from None
                for index, slot in batch:
                    self._layer.set_scale_rows(slot, *content.scale_rows[index])
                bar.advance(len(batch))

    def write(self, slots: Slots, progress: Report | None = None) -> None:
        """Keeps what the slots hold. A folder that cannot be written to is a warning, not an error."""
        if not slots:
            return
        if not self._identity["sources"] or self._identity != self._find_identity():
            return  # something changed while it was loaded: nobody knows what was
        experts = sorted(slots)
        parts = len(self._layer.packed_parts)
        scale_rows = [self._layer.scale_rows(slots[expert][0]) for expert in experts]
        begin = _round_up(len(self._head(experts, scale_rows, [0] * (len(experts) * parts))))
        size = begin + self._layer.packed_bytes(len(experts))
        label = f"layer {self._layer_idx} to the store"
        try:
            with (
                WholeFile(self.path, size, "packed weights", f"*{_SUFFIX}.tmp") as file,
                Progress(label, len(experts), progress and (lambda *_: None)) as bar,
            ):
                checksums: list[int] = []
                for batch in self._batches([(index, slots[expert][0]) for index, expert in enumerate(experts)]):
                    checksums += self._layer.write_packed(file.fd, self._shown, begin, len(experts), batch)
                    bar.advance(len(batch))
                file.write_at(0, self._head(experts, scale_rows, checksums))
        except OSError as error:
            if error.errno != errno.EBUSY:  # then another process keeps the same
                _warn(f"{os.path.dirname(self._shown)}: {error.strerror or error}. The next start has to pack again")

    def _head(self, experts: list[int], scale_rows: list[tuple[int, ...]], checksums: list[int]) -> bytes:
        """Its length does not depend on the values of the checksums."""
        sums = b"".join(checksum.to_bytes(8, "little") for checksum in checksums).hex()
        fields = {**self._identity, "experts": experts, "scale_rows": scale_rows, "checksums": sums}
        header = json.dumps(fields, separators=(",", ":")).encode()
        start = _MAGIC + LAYOUT_VERSION.to_bytes(8, "little") + len(header).to_bytes(8, "little")
        return start + _digest(start, header) + header

    def _batches(self, pairs: Pairs) -> Iterator[Pairs]:
        step = max(1, _BATCH // self._layer.packed_bytes_per_expert)
        return (pairs[begin : begin + step] for begin in range(0, len(pairs), step))


def file_name(source: Path, layer_idx: int, weight_format: str) -> str:
    model = Path(os.path.abspath(source)).name or "weights"
    return f"{model}.layer-{layer_idx:05d}.{weight_format.replace('/', '-')}{_SUFFIX}"


def _read_header(fd: int) -> tuple[dict, int, int]:
    """The header, where the body begins, and the bytes of the file."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise _DamagedError("it is no file")
    start = os.pread(fd, _PREAMBLE, 0)
    if not start.startswith(_MAGIC):
        raise _DamagedError("kt-kernel did not write it")
    if len(start) < _PREAMBLE:
        raise _DamagedError(f"it is cut short: {status.st_size} bytes")
    version, length = (int.from_bytes(start[at : at + 8], "little") for at in (8, 16))
    if version != LAYOUT_VERSION:
        raise _StaleError(f"layout version was {version}, is {LAYOUT_VERSION}")
    if length > min(MAX_HEADER, status.st_size - _PREAMBLE):
        raise _DamagedError(f"it is cut short: {status.st_size} bytes, header of {length} bytes")
    text = os.pread(fd, length, _PREAMBLE)
    if _digest(start[:24], text) != start[24:]:
        raise _DamagedError("the checksum of its header is wrong")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise _DamagedError("its header is no JSON object")
    return header, _round_up(_PREAMBLE + length), status.st_size


def _are_experts(experts: object, count: int) -> bool:
    return (
        isinstance(experts, list)
        and all(type(expert) is int and 0 <= expert < count for expert in experts)
        and 0 < len(experts) == len(set(experts))
    )


def _are_scale_rows(rows: object, experts: int) -> bool:
    return (
        isinstance(rows, list)
        and len(rows) == experts
        and all(
            isinstance(of, list) and len(of) == 3 and all(type(n) is int and 0 < n < 1 << 31 for n in of) for of in rows
        )
    )


def _checksums(header: dict, experts: int, parts: int) -> list[list[int]]:
    try:
        raw = bytes.fromhex(header.get("checksums"))
    except (TypeError, ValueError):
        raw = b""
    if len(raw) != 8 * experts * parts:
        raise _DamagedError("its list of checksums is wrong")
    values = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
    return [values[at : at + parts] for at in range(0, len(values), parts)]


def _sources(opened: Path | TensorFiles | GgufFiles, layer_idx: int) -> list[list[object]]:
    """Name, size, time and hash of the header of every file that holds something of the layer. The data is not read.

    Nothing where a file cannot be looked at: the load will say why.
    """
    if isinstance(opened, Path):
        folder = opened / f"_layer_{layer_idx}"
        files = {str(file.relative_to(folder)): file for file in folder.rglob("*.kt")}
    else:
        theirs, ours = f"layers.{layer_idx}.", f"blk.{layer_idx}."
        files = {file.name: file for file in {opened.file_of(n) for n in opened if theirs in n or ours in n}}
    try:
        return [[name, *_facts(file)] for name, file in sorted(files.items())]
    except OSError:
        return []


def _config_digest(opened: Path | TensorFiles | GgufFiles) -> str:
    """Of the config.json beside the weights, which may tell how tensors are to be read; nothing where there is none."""
    path = opened if isinstance(opened, Path) else opened.path
    try:
        return _digest(((path if path.is_dir() else path.parent) / "config.json").read_bytes()).hex()
    except OSError:
        return ""


def _facts(file: Path) -> tuple[int, int, str]:
    status = os.stat(file)
    digest = "" if file.suffix == ".kt" else _header_digest(file, status.st_size, status.st_mtime_ns, status.st_ino)
    return status.st_size, status.st_mtime_ns, digest


@lru_cache(maxsize=1024)  # as many layers share a file
def _header_digest(file: Path, _size: int, _mtime_ns: int, _inode: int) -> str:
    with open(file, "rb") as opened:
        start = opened.read(8)
        gguf = start.startswith(gguf_file.MAGIC)
        length = gguf_file.read_header(file).bytes - 8 if gguf else int.from_bytes(start, "little")
        return _digest(start, opened.read(min(MAX_HEADER, length))).hex()


def _digest(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=8).digest()


def _round_up(size: int) -> int:
    return -(-size // _core.MoELayer.packed_alignment) * _core.MoELayer.packed_alignment


def _warn(text: str) -> None:
    # From here, so that Python shows the same text once, however many layers meet the same obstacle.
    warnings.warn(f"weight store: {text}", RuntimeWarning, stacklevel=1)
