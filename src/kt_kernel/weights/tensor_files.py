"""Reads safetensors: one file, or a folder of them with or without model.safetensors.index.json.

File = [u64 little-endian: header bytes][header: JSON][data]. The header maps names to dtype, shape and data_offsets,
which count from the start of the data; "__metadata__" maps strings to strings. Headers are checked before anything is
read from where they point to.
"""

import json
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from kt_kernel.weights.mapped_file import MappedTensors, MissingTensorError

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; the largest models need a tenth

# dtype -> bits of an element, and what numpy calls it; types that numpy lacks are bytes or bits
_DTYPES = {
    "BOOL": (8, np.bool_),
    "U8": (8, np.uint8),
    "I8": (8, np.int8),
    "F8_E4M3": (8, np.uint8),
    "F8_E4M3FNUZ": (8, np.uint8),
    "F8_E5M2": (8, np.uint8),
    "F8_E5M2FNUZ": (8, np.uint8),
    "F8_E8M0": (8, np.uint8),
    "I16": (16, np.int16),
    "U16": (16, np.uint16),
    "F16": (16, np.float16),
    "BF16": (16, np.uint16),
    "I32": (32, np.int32),
    "U32": (32, np.uint32),
    "F32": (32, np.float32),
    "F64": (64, np.float64),
    "I64": (64, np.int64),
    "U64": (64, np.uint64),
    "C64": (64, np.complex64),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
}


class Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    begin: int  # in the file
    end: int


class Placed(Protocol):
    """A tensor that lies at these bytes of its file."""

    begin: int
    end: int


class Header(NamedTuple):
    tensors: dict[str, Entry]
    metadata: dict[str, str]


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


def parse_json(path: Path, text: bytes) -> dict:
    try:
        parsed = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its JSON is damaged ({error}); copy or download the file again") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path}: its JSON is not an object; copy or download the file again")
    return parsed


def _sizes(value: object) -> tuple[int, ...] | None:
    """A list of sizes or offsets; booleans are ints to Python, but not here."""
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def tensor_bits(dtype: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * _DTYPES[dtype][0]


def _entry(where: str, fields: object, data_begin: int, file_bytes: int) -> Entry:
    if not isinstance(fields, dict):
        raise ValueError(f"{where} has no dtype, shape and data_offsets")
    dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{where} has the unknown dtype {dtype!r}")
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{where} has a shape or data_offsets that are no sizes")
    begin, end = (data_begin + offset for offset in offsets)
    if begin > end or end > file_bytes:
        raise ValueError(
            f"{where} lies at bytes {begin}..{end} of a file of {file_bytes} bytes; the file is cut short or damaged: "
            "copy or download it again"
        )
    if (end - begin) * 8 != tensor_bits(dtype, shape):
        raise ValueError(f"{where} is {dtype} {list(shape)}, but the file gives it {end - begin} bytes")
    return Entry(dtype, shape, begin, end)


def check_overlaps(path: Path, tensors: Mapping[str, Placed]) -> None:
    last_name, last_end = "", 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < last_end and entry.begin != entry.end:
            raise ValueError(f"{path}: tensors {last_name!r} and {name!r} overlap; the file is damaged")
        if entry.end > last_end:
            last_name, last_end = name, entry.end


@lru_cache(maxsize=1024)  # a model has up to some hundred files, and every layer asks again
def _cached_header(path: Path, file_bytes: int, _mtime_ns: int, _inode: int) -> Header:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file_bytes < 10 or length > min(MAX_HEADER, file_bytes - 8):
            raise ValueError(
                f"{path} is no safetensors file, or is cut short: {file_bytes} bytes, header of {length} bytes; "
                "copy or download it again"
            )
        fields = parse_json(path, file.read(length))
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: __metadata__ must map strings to strings")
    tensors = {
        name: _entry(f"{path}: tensor {name!r}", value, 8 + length, file_bytes) for name, value in fields.items()
    }
    check_overlaps(path, tensors)
    return Header(tensors, metadata)


def file_version(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino


def read_header(path: Path) -> Header:
    return _cached_header(path, *file_version(path))


def _read_index(folder: Path) -> dict[str, Path]:
    """Tensor -> file. Not to be changed."""
    return _cached_index(folder, *file_version(folder / INDEX))


@lru_cache(maxsize=4)  # 0.1 s and 13 MB for 94,000 tensors; every layer asks when it is made and when it is loaded
def _cached_index(folder: Path, _bytes: int, _mtime_ns: int, _inode: int) -> dict[str, Path]:
    path = folder / INDEX
    files = parse_json(path, path.read_bytes()).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{path}: weight_map must map tensors to files; copy or download it again")
    for file in set(files.values()):
        if Path(file).name != file:
            raise ValueError(f"{path}: weight_map names {file!r}, which is no file of this folder")
    paths = {file: folder / file for file in set(files.values())}
    return {name: paths[file] for name, file in files.items()}


def _item_bytes(entry: Entry, index: int) -> tuple[int, int]:
    """Where tensor[index] begins and ends in its file."""
    item = (entry.end - entry.begin) // max(1, entry.shape[0])
    return entry.begin + index * item, entry.begin + (index + 1) * item


class TensorFiles(MappedTensors):
    """The tensors below a path, by name. A context manager: at its end the mappings are dropped."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._headers: dict[Path, Header] = {}
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; weights are a folder of *.safetensors, or one such file")
        if path.is_dir() and (path / INDEX).exists():
            self._files = _read_index(path)
            return
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise FileNotFoundError(f"{path} has no *.safetensors; is it the folder of the model, and downloaded?")
        for file in files:
            for name in read_header(file).tensors:
                if name in self._files:
                    raise ValueError(
                        f"tensor {name!r} is both in {self._files[name]} and in {file}; remove one of them"
                    )
                self._files[name] = file

    def entry(self, name: str) -> Entry:
        file = self.file_of(name)
        if file not in self._headers:
            if not file.exists():
                raise FileNotFoundError(
                    f"{file} is missing; {INDEX} says that it holds {name!r}. Download the model again, it is "
                    "incomplete"
                )
            self._headers[file] = read_header(file)
        tensors = self._headers[file].tensors
        if name not in tensors:
            raise MissingTensorError(f"{file} has no tensor {name!r}, though {INDEX} says so; download both again")
        return tensors[name]

    def metadata_of(self, name: str) -> dict[str, str]:
        """What the file of this tensor says about itself."""
        return read_header(self.file_of(name)).metadata

    def array(self, name: str, dtypes: Iterable[str], shape: tuple[int, ...]) -> np.ndarray:
        """A view of the file. bf16 comes as uint16, fp8 as uint8."""
        entry = self._checked(name, dtypes, shape)
        return self._mapped(name).array(entry.begin, _DTYPES[entry.dtype][1], shape)

    def item(
        self, name: str, dtypes: Iterable[str], shape: tuple[int, ...], index: int, rows: slice = slice(None)
    ) -> np.ndarray:
        """array(...)[index, rows] of a tensor whose elements are whole bytes, without touching the rest of it."""
        entry = self._checked(name, dtypes, shape)
        (begin, end), (first, last, _) = _item_bytes(entry, index), rows.indices(shape[1])
        row_bytes = (end - begin) // max(1, shape[1])
        part = (last - first, *shape[2:])
        return self._mapped(name).array(begin + first * row_bytes, _DTYPES[entry.dtype][1], part)

    def _checked(self, name: str, dtypes: Iterable[str], shape: tuple[int, ...]) -> Entry:
        entry = self.entry(name)
        if entry.dtype not in dtypes or entry.shape != shape:
            raise ValueError(
                f"{self.file_of(name)}: tensor {name!r} is {entry.dtype} {list(entry.shape)}; "
                f"needed is {' or '.join(dtypes)} {list(shape)}"
            )
        return entry

    def will_need(self, names: Iterable[str], index: int | None = None) -> None:
        """Tensors, or with an index their items."""
        for name in names:
            if name in self:
                entry = self.entry(name)
                begin, end = (entry.begin, entry.end) if index is None else _item_bytes(entry, index)
                self._mapped(name).will_need(begin, end)
