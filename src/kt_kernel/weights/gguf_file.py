"""Reads the header of a GGUF file, version 2 or 3, little-endian.

file    magic "GGUF" | version u32 | tensors u64 | fields u64 | fields | tensors | zeros up to a multiple of
        general.alignment (32 if there is no such field) | data
field   key | type u32 | value; an array is: type of its elements u32, count u64, elements
tensor  name | dimensions u32 | sizes u64 each, innermost first | type u32 | offset in the data u64
string  bytes u64 | UTF-8

Nothing is believed: every count is held against the bytes that are left before anything is done that many times, and
tensors must lie in the file, aligned, apart from each other. Long arrays, such as vocabularies, are passed over;
`read_field` has them.
"""

import struct
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kt_kernel.ggml_types import EXPERT_TYPES, TYPES, GgmlType
from kt_kernel.weights.mapped_file import MappedFile
from kt_kernel.weights.tensor_files import MAX_HEADER, check_overlaps, file_version

MAGIC = b"GGUF"
ALIGNMENT = "general.alignment"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_LONGEST_ARRAY = 4096  # elements that are kept: some families have a number for each layer

_AGAIN = "the file is cut short or damaged: copy or download it again"

# type of a field -> how struct spells it
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_LEAST_FIELD = 8 + 4 + 1  # bytes
_LEAST_TENSOR = 8 + 4 + 4 + 8


class GgufTensor(NamedTuple):
    type: GgmlType
    shape: tuple[int, ...]  # outermost first, as numpy has them; files have them the other way round
    begin: int  # in the file
    end: int

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.type, self.shape)


class PassedOver(NamedTuple):
    """An array that was not read."""

    count: int


Value = int | float | bool | str | list | PassedOver


class GgufHeader(NamedTuple):
    tensors: dict[str, GgufTensor]
    fields: dict[str, Value]
    bytes: int


def row_bytes(kind: GgmlType, shape: tuple[int, ...]) -> int:
    return (shape[-1] if shape else 1) // kind.block * kind.bytes


class _Reader:
    """A place in a header. Reading past its end is an error that says what was read."""

    def __init__(self, path: Path, data: memoryview):
        self.path, self.data, self.at = path, data, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def wrong(self, what: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {what} {problem}; {_AGAIN}")

    def take(self, size: int, what: str) -> int:
        """Passes over `size` bytes; where they begin."""
        if size > self.left:
            raise self.wrong(what, f"needs {size} bytes, but {self.left} are left in the header")
        begin, self.at = self.at, self.at + size
        return begin

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.data, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.data, self.take(8, what))[0]

    def string(self, what: str, errors: str = "strict") -> str:
        size = self.u64(what)
        begin = self.take(size, what)
        try:
            return str(self.data[begin : begin + size], "utf-8", errors)
        except UnicodeDecodeError:
            raise self.wrong(what, "is no UTF-8") from None

    def count(self, least: int, what: str) -> int:
        """Of things that have `least` bytes or more each."""
        count = self.u64(what)
        if count * least > self.left:
            raise self.wrong(what, f"is {count}, but {self.left} bytes are left in the header")
        return count

    def skip_strings(self, count: int, what: str) -> None:
        at, data, unpack = self.at, self.data, _U64.unpack_from
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError):
            at = len(data) + 1
        if at > len(data):
            raise self.wrong(what, "ends beyond the header")
        self.at = at


def _quoted(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:97] + "...")


def _value(reader: _Reader, kind: int, what: str, whole: bool = False) -> Value:
    """With `whole` also long arrays, and those of strings."""
    if kind == _STRING:
        return reader.string(what, "replace")
    if kind != _ARRAY:
        return _scalars(reader, kind, 1, what)[0]
    kind = reader.u32(what)
    if kind == _ARRAY:
        raise reader.wrong(what, "is an array of arrays, which no GGUF file has")
    if kind == _STRING:
        count = reader.count(8, f"the length of {what}")
        if whole:
            return [reader.string(what, "replace") for _ in range(count)]
        reader.skip_strings(count, what)
        return PassedOver(count)
    count = reader.count(_scalar_bytes(reader, kind, what), f"the length of {what}")
    if whole or count <= _LONGEST_ARRAY:
        return _scalars(reader, kind, count, what)
    reader.take(count * _scalar_bytes(reader, kind, what), what)
    return PassedOver(count)


def _scalar_bytes(reader: _Reader, kind: int, what: str) -> int:
    if kind not in _SCALARS:
        raise reader.wrong(what, f"has the unknown type {kind}")
    return struct.calcsize(f"<{_SCALARS[kind]}")


def _scalars(reader: _Reader, kind: int, count: int, what: str) -> list:
    size = count * _scalar_bytes(reader, kind, what)
    return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", reader.data, reader.take(size, what)))


def _fields(reader: _Reader, count: int) -> dict[str, Value]:
    fields: dict[str, Value] = {}
    for index in range(count):
        key = reader.string(f"the key of field {index}")
        what = f"field {_quoted(key)}"
        if key in fields:
            raise reader.wrong(what, "occurs twice")
        fields[key] = _value(reader, reader.u32(what), what)
    return fields


class _Info(NamedTuple):
    type: GgmlType
    shape: tuple[int, ...]
    offset: int


def _tensor_info(reader: _Reader, what: str) -> _Info:
    dimensions = reader.u32(what)
    if dimensions > _MAX_DIMENSIONS:
        raise reader.wrong(what, f"has {dimensions} dimensions; GGUF has up to {_MAX_DIMENSIONS}")
    sizes = struct.unpack_from(f"<{dimensions}Q", reader.data, reader.take(8 * dimensions, what))
    type_id, offset = reader.u32(what), reader.u64(what)
    if type_id not in TYPES:
        known = ", ".join(kind.name.upper() for kind in EXPERT_TYPES.values())
        raise ValueError(
            f"{reader.path}: {what} has the type {type_id}, which is not known. Experts may have {known}: take a file "
            "in one of these, or a newer kt-kernel; if it should be one of these, download the file again"
        )
    kind = TYPES[type_id]
    row = sizes[0] if sizes else 1
    if row % kind.block:
        raise reader.wrong(what, f"has rows of {row} weights; {kind.name} has blocks of {kind.block}")
    return _Info(kind, sizes[::-1], offset)


def _tensor_infos(reader: _Reader, count: int) -> dict[str, _Info]:
    infos: dict[str, _Info] = {}
    for index in range(count):
        name = reader.string(f"the name of tensor {index}")
        what = f"tensor {_quoted(name)}"
        if name in infos:
            raise reader.wrong(what, "occurs twice")
        infos[name] = _tensor_info(reader, what)
    return infos


def _place(reader: _Reader, name: str, info: _Info, data_begin: int, alignment: int, file_bytes: int) -> GgufTensor:
    size = prod(info.shape[:-1]) * row_bytes(info.type, info.shape)
    begin = data_begin + info.offset
    if info.offset % alignment:
        raise reader.wrong(f"tensor {_quoted(name)}", f"begins at {info.offset}, no multiple of {alignment}")
    if begin + size > file_bytes:
        raise ValueError(
            f"{reader.path}: tensor {_quoted(name)}, {info.type.name} {list(info.shape)}, lies at bytes {begin}.."
            f"{begin + size} of a file of {file_bytes} bytes; {_AGAIN}"
        )
    return GgufTensor(info.type, info.shape, begin, begin + size)


def _alignment(reader: _Reader, fields: dict[str, Value]) -> int:
    alignment = fields.get(ALIGNMENT, 32)
    if type(alignment) is not int or not 0 < alignment < 1 << 32 or alignment & (alignment - 1):
        raise reader.wrong(ALIGNMENT, f"is {alignment!r}; needed is a power of two")
    return alignment


def _check_start(path: Path, start: bytes) -> None:
    if start[:4] != MAGIC:
        if start.startswith(b"version "):
            raise ValueError(f"{path} is a pointer of Git LFS, not the GGUF file itself: fetch it with 'git lfs pull'")
        raise ValueError(
            f"{path} is no GGUF file: it begins with {start[:4]!r}, not {MAGIC!r}; is the download complete?"
        )
    if len(start) < 8:
        raise ValueError(f"{path}: {_AGAIN}")
    version = _U32.unpack_from(start, 4)[0]
    if int.from_bytes(start[4:8], "big") in range(1, 256):
        raise ValueError(
            f"{path} is a big-endian GGUF file, which is not supported: take a little-endian one, or convert it with "
            "gguf-convert-endian of the package gguf"
        )
    if version not in _VERSIONS:
        raise ValueError(
            f"{path} is GGUF of version {version}; supported are {' and '.join(map(str, _VERSIONS))}: convert the "
            "model again with a recent llama.cpp, or download another file"
        )


def _open(path: Path) -> tuple[_Reader, int, int]:
    """At the first field; the numbers of bytes in the file and of tensors."""
    mapped = MappedFile(path)
    data = memoryview(mapped.array(0, np.uint8, (min(mapped.size, MAX_HEADER),)))
    _check_start(path, bytes(data[:8]))
    reader = _Reader(path, data)
    reader.at = 8
    return reader, mapped.size, reader.count(_LEAST_TENSOR, "the number of tensors")


@lru_cache(maxsize=1024)  # as for safetensors: every layer asks again
def _cached_header(path: Path, _bytes: int, _mtime_ns: int, _inode: int) -> GgufHeader:
    reader, file_bytes, tensors = _open(path)
    fields = _fields(reader, reader.count(_LEAST_FIELD, "the number of fields"))
    if tensors * _LEAST_TENSOR > reader.left:
        raise reader.wrong("the number of tensors", f"is {tensors}, but {reader.left} bytes are left in the header")
    infos = _tensor_infos(reader, tensors)
    alignment = _alignment(reader, fields)
    begin = -(-reader.at // alignment) * alignment
    placed = {name: _place(reader, name, info, begin, alignment, file_bytes) for name, info in infos.items()}
    check_overlaps(path, placed)
    return GgufHeader(placed, fields, reader.at)


def read_header(path: Path) -> GgufHeader:
    """Not to be changed."""
    return _cached_header(path, *file_version(path))


def read_field(path: Path, key: str) -> Value | None:
    """One field, whole, however long it is; None: there is no such field."""
    reader, _, _ = _open(path)
    for index in range(reader.count(_LEAST_FIELD, "the number of fields")):
        found = reader.string(f"the key of field {index}")
        what = f"field {_quoted(found)}"
        value = _value(reader, reader.u32(what), what, whole=found == key)
        if found == key:
            return value
    return None
