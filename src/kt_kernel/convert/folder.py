"""The folder that a conversion writes, and what it says about itself.

layer-{L:05d}.safetensors      the weights, see weights/canonical.py
kt-conversion.json             the manifest: source, method, layout version; of every finished layer its file, bytes,
                               SHA-256 and errors. Replaced after each layer, so that a killed conversion goes on
kt-quality.json                the report of quality.py
model.safetensors.index.json   tensor -> file, as the hub has it
SHA256SUMS                     for `sha256sum -c`
config.json, tokenizers        copies of the source's, so that tools know the model
All but the layers are small. Every file is there whole or not at all; a layer counts once the manifest has it.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kt_kernel import _core
from kt_kernel.convert.errors import ConvertError
from kt_kernel.convert.source import Source
from kt_kernel.weights import canonical
from kt_kernel.weights.canonical import file_name
from kt_kernel.weights.tensor_files import INDEX, parse_json, read_header
from kt_kernel.weights.whole_file import WholeFile, remove_leftovers
from kt_kernel.weights.writer import LEFTOVERS

MANIFEST = "kt-conversion.json"
QUALITY = "kt-quality.json"
SUMS = "SHA256SUMS"
_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_SMALL_FILES = 1 << 26  # bytes kept free for everything but the layers

Record = dict[str, object]  # file, bytes, sha256, seconds, quality


class OutputFolder:
    """`identity` is what the layers are made of and for: layers of another one are not kept."""

    def __init__(self, path: Path, identity: dict[str, object]):
        self.path, self._identity = path, identity
        self.records: dict[int, Record] = {}

    @contextmanager
    def opened(self, overwrite: bool) -> Iterator[None]:
        """Held by one process at a time. Reads what an earlier conversion finished."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConvertError(
                f"cannot write to {self.path}: {error.strerror}; choose a folder that you may write to"
            ) from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConvertError(f"{self.path}: another process converts into this folder; wait for it") from None
            except OSError:
                pass  # a file system without locks for folders: two conversions at once are the user's problem
            remove_leftovers(self.path, LEFTOVERS)
            self._read(overwrite)
            yield
        finally:
            os.close(lock)

    def _read(self, overwrite: bool) -> None:
        manifest = self.path / MANIFEST
        if overwrite:
            layers = [file.name for file in self.path.glob("layer-[0-9]*.safetensors")]
            for name in (MANIFEST, QUALITY, INDEX, SUMS, *layers):
                (self.path / name).unlink(missing_ok=True)
        if not manifest.exists():
            others = sorted(file.name for file in self.path.glob("*.safetensors"))
            if others and not overwrite:
                raise ConvertError(
                    f"{self.path} holds {others[0]} and no {MANIFEST}, so it is no folder of a conversion; choose "
                    "another one, or pass --overwrite to write here all the same"
                )
            return
        try:
            found = parse_json(manifest, manifest.read_bytes())
        except ValueError as error:
            raise ConvertError(f"{error}; pass --overwrite to convert all layers again") from None
        for field, ours in self._identity.items():
            if found.get(field) != ours:
                raise ConvertError(
                    f"{self.path} holds a conversion with another {field} ({_short(found.get(field))}, now "
                    f"{_short(ours)}); choose another folder, or pass --overwrite to begin anew"
                )
        layers = found.get("layers")
        self.records = {int(index): record for index, record in (layers if isinstance(layers, dict) else {}).items()}

    def is_sound(self, layer_idx: int) -> bool:
        """Whether a finished layer is still what was written. Reads all of it."""
        record = self.records.get(layer_idx)
        path = self.path / file_name(layer_idx)
        try:
            return record is not None and path.stat().st_size == record["bytes"] and digest(path) == record["sha256"]
        except (OSError, KeyError, TypeError):
            return False

    def discard(self, layer_idx: int) -> None:
        """A layer that is made again needs the space, and must not be taken for a finished one."""
        (self.path / file_name(layer_idx)).unlink(missing_ok=True)
        if self.records.pop(layer_idx, None) is not None:
            self.write_manifest(complete=False)

    def check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.path).free
        if needed and needed + _SMALL_FILES > free:
            raise ConvertError(
                f"{self.path}: the layers need {_gigabytes(needed)}, and the disk has {_gigabytes(free)} free; free "
                f"{_gigabytes(needed + _SMALL_FILES - free)} more, or choose another folder"
            )

    def add(self, layer_idx: int, record: Record) -> None:
        self.records[layer_idx] = record
        self.write_manifest(complete=False)

    def write_manifest(self, complete: bool) -> None:
        layers = {str(index): record for index, record in sorted(self.records.items())}
        made_by = f"kt-kernel {_core.__version__}"
        self._write(MANIFEST, {"made_by": made_by, **self._identity, "complete": complete, "layers": layers})

    def finish(self, quality: dict[str, object], source: Path, complete: bool) -> None:
        """Everything that names all layers. The manifest comes last."""
        weight_map: dict[str, str] = {}
        total = 0
        for index in sorted(self.records):
            name = file_name(index)
            for tensor, entry in read_header(self.path / name).tensors.items():
                weight_map[tensor] = name
                total += entry.end - entry.begin
        self._write(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        self._write(QUALITY, quality)
        for name in _COPIED:
            if (source / name).is_file():
                self._write(name, (source / name).read_bytes())
        sums = [f"{record['sha256']}  {record['file']}\n" for _, record in sorted(self.records.items())]
        self._write(SUMS, "".join(sums).encode())
        self.write_manifest(complete)

    def _write(self, name: str, content: bytes | dict[str, object]) -> None:
        data = content if isinstance(content, bytes) else (json.dumps(content, indent=1) + "\n").encode()
        with WholeFile(self.path / name, len(data), "converted weights", f"{name}.tmp") as file:
            file.write_at(0, data)


def identity_of(weight_format: str, method: str, search: bool, source: Source, files: list[Path]) -> dict[str, object]:
    """What must be the same for a layer that was converted before to be kept."""
    config = source.folder / "config.json"
    return {
        "method": method,
        "format": weight_format,
        "layout_version": canonical.VERSIONS[weight_format],
        "scales": "searched" if search else "largest",
        "input_type": source.input_type,
        "source": str(source.path.resolve()),
        "config_sha256": digest(config) if config.is_file() else "",
        "source_files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)},
    }


def digest(path: Path) -> str:
    """SHA-256 of a file. Other threads of Python run meanwhile."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
