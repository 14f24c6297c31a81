"""The GGUF files of a model: one file, the parts of a split model (NAME-00001-of-00003.gguf), or a folder of either."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kt_kernel.weights.gguf_file import MAGIC, GgufHeader, GgufTensor, Value, read_header
from kt_kernel.weights.mapped_file import MappedTensors

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_SHOWN = 3  # names in a message


def is_gguf_file(path: Path) -> bool:
    """By its name or by its first bytes: some programs keep models under names without an ending."""
    if not path.is_file():
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() == SUFFIX and file.is_file())


def holds_gguf(path: Path) -> bool:
    """A file, or a folder in which others may be too."""
    return is_gguf_file(path) or (path.is_dir() and bool(gguf_files_in(path)))


class _Model(NamedTuple):
    """A name, of which there may be several parts; 0: it is one file."""

    stem: str
    parts: int


def _model_of(file: Path) -> tuple[_Model, int]:
    """The model, and the number of this part of it."""
    part = _PART.fullmatch(file.name)
    if part is None or int(part["count"]) == 0:
        return _Model(file.name, 0), 0
    return _Model(part["stem"], int(part["count"])), int(part["number"])


def _models_in(folder: Path) -> dict[_Model, dict[int, Path]]:
    models: dict[_Model, dict[int, Path]] = {}
    for file in gguf_files_in(folder):
        model, number = _model_of(file)
        models.setdefault(model, {})[number] = file
    return models


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _all_parts(folder: Path, model: _Model, there: dict[int, Path]) -> list[Path]:
    numbers = range(1, model.parts + 1)
    missing = [f"{model.stem}-{number:05d}-of-{model.parts:05d}{SUFFIX}" for number in numbers if number not in there]
    if missing:
        raise FileNotFoundError(
            f"{folder}: of the {model.parts} parts of {model.stem} {len(missing)} are missing: {_some(missing)}; "
            "download them into this folder"
        )
    return [there[number] for number in numbers]


def _is_model(header: GgufHeader) -> bool:
    """Not a projector of images (mmproj), an adapter or statistics, which lie beside models in one folder."""
    fields = header.fields
    return fields.get("general.type", "model") == "model" and fields.get("general.architecture") != "clip"


def models_in(folder: Path) -> list[Path]:
    """The file of each model, or its first part that is there. Projectors and the like are not told apart."""
    return [files[min(files)] for files in _models_in(folder).values()]


def find_files(path: Path) -> list[Path]:
    """The files of the model at `path`, in order."""
    if not path.is_dir():
        model, _ = _model_of(path)
        return _all_parts(path.parent, model, _models_in(path.parent)[model]) if model.parts else [path]
    models = _models_in(path)
    if not models:
        below = [f"{folder.name}/" for folder in sorted(path.iterdir()) if folder.is_dir() and gguf_files_in(folder)]
        hint = f"; there are some in {_some(below)}" if below else ""
        raise FileNotFoundError(f"{path} has no *{SUFFIX}{hint}; give the file, or the folder that it is in")
    # Of a model in parts only the first says what it is; nothing else comes in parts.
    found = [model for model, files in models.items() if model.parts or _is_model(read_header(files[0]))]
    if len(found) != 1:
        several = f"has several models ({_some(model.stem for model in found)})"
        what = several if found else "has no model, only what goes with one"
        raise ValueError(f"{path} {what}; give the {SUFFIX} file, or its first part, instead of the folder")
    model = found[0]
    return _all_parts(path, model, models[model]) if model.parts else [models[model][0]]


def _number(file: Path, fields: Mapping[str, Value], key: str, default: int) -> int:
    value = fields.get(key, default)
    if type(value) is not int:
        raise ValueError(f"{file}: {key} is {value!r}; needed is a whole number. Download the file again")
    return value


def _check_parts(files: list[Path], headers: list[GgufHeader]) -> None:
    """What parts say about themselves, where they do."""
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        said = _number(file, header.fields, "split.count", len(files)), _number(file, header.fields, "split.no", number)
        if len(files) == 1 and said[0] > 1:
            raise ValueError(
                f"{file} is part {said[1] + 1} of {said[0]}, and its name does not tell the others: give the parts "
                "their names back, NAME-00001-of-00003.gguf and so on"
            )
        if said != (len(files), number) and len(files) > 1:
            raise ValueError(
                f"{file} says that it is part {said[1] + 1} of {said[0]}, its name says {number + 1} of {len(files)}: "
                "download the parts again"
            )
    total = sum(len(header.tensors) for header in headers)
    said_total = _number(files[0], headers[0].fields, "split.tensors.count", total) if len(files) > 1 else total
    if said_total != total:
        raise ValueError(
            f"{files[0]} says that the {len(files)} parts have {said_total} tensors; they have {total}: download the "
            "parts again"
        )


class GgufFiles(MappedTensors):
    """The tensors of a model, by name. A context manager: at its end the mappings are dropped."""

    def __init__(self, path: Path):
        super().__init__(path)
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist; GGUF weights are a {SUFFIX} file, or a folder of one model"
            )
        files = find_files(path)
        headers = [read_header(file) for file in files]
        _check_parts(files, headers)
        self.fields = headers[0].fields
        self._headers = dict(zip(files, headers, strict=True))
        for file, header in self._headers.items():
            for name in header.tensors:
                if name in self._files:
                    raise ValueError(
                        f"tensor {name!r} is both in {self._files[name]} and in {file}: download the parts again"
                    )
                self._files[name] = file

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))

    def field(self, name: str) -> Value | None:
        """{architecture}.name"""
        return self.fields.get(f"{self.architecture}.{name}")

    def entry(self, name: str) -> GgufTensor:
        return self._headers[self.file_of(name)].tensors[name]

    def where(self, name: str) -> str:
        return f"{self.file_of(name)}: tensor {name!r}"

    def rows(self, name: str, first: int, count: int) -> np.ndarray:
        """uint8 [count, bytes of a row]: rows `first` and following, of all but the last dimension taken together."""
        entry = self.entry(name)
        size = entry.row_bytes
        return self._mapped(name).array(entry.begin + first * size, np.uint8, (count, size))

    def will_need(self, name: str, first: int, count: int) -> None:
        """Rows as above."""
        entry = self.entry(name)
        begin = entry.begin + first * entry.row_bytes
        self._mapped(name).will_need(begin, begin + count * entry.row_bytes)
