"""Whether the files of a model are what they should be.

Headers are held against sizes, tensors against the index. Checksums come from whoever wrote the files: a conversion
(kt-conversion.json, SHA256SUMS), a download into a folder (.cache/huggingface/download/FILE.metadata: commit, etag,
time), or the cache of huggingface_hub (a link to blobs/ETAG). An etag of the hub is the SHA-256 of a large file, or
git's SHA-1 of a small one.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kt_kernel.convert.folder import MANIFEST, SUMS
from kt_kernel.registry.contents import weight_files
from kt_kernel.registry.resumable import METADATA
from kt_kernel.weights.gguf_files import GgufFiles, holds_gguf
from kt_kernel.weights.tensor_files import INDEX, parse_json, read_header

_BLOCK = 1 << 22
_READERS = 4  # threads; one computes SHA-256 at 1.7 GB/s (Zen 4), less than what disks read
_HEX = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

Progress = Callable[[int], None]  # bytes read since the last call; of several threads


@dataclass(frozen=True)
class Check:
    file: str
    sound: bool
    about: str  # what was compared, or what is wrong
    by_checksum: bool = False  # which told


@dataclass(frozen=True)
class Expected:
    digest: str
    bytes: int | None = None
    source: str = ""


def expected_digests(path: Path) -> dict[Path, Expected]:
    """Of all files that somebody wrote down a checksum of, there or not."""
    if path.is_file():
        return _of_hub_cache([path])
    found = _of_hub_cache(file for file in path.rglob("*") if file.is_symlink())
    found |= _of_download(path)
    found |= _of_sums(path)
    found |= _of_manifest(path)
    return found


def check(path: Path, expected: dict[Path, Expected], progress: Progress) -> list[Check]:
    """Every file that has a checksum, or weights; then what the files say about each other."""
    folder = path if path.is_dir() else path.parent

    def check_one(file: Path) -> Check:
        name = str(file.relative_to(folder)) if file.is_relative_to(folder) else file.name
        return _check_file(name, file, expected.get(file), progress)

    with ThreadPoolExecutor(_READERS) as readers:
        checks = list(readers.map(check_one, sorted({*weight_files(path), *expected})))
    if whole := _check_whole(path):
        checks.append(whole)
    return checks


def _check_file(name: str, file: Path, expected: Expected | None, progress: Progress) -> Check:
    try:
        if not file.is_file():
            return Check(name, False, "is missing")
        size = file.stat().st_size
        if expected and expected.bytes is not None and size != expected.bytes:
            return Check(name, False, f"has {size} bytes instead of {expected.bytes}")
        if expected and digest(file, expected.digest, progress) != expected.digest:
            return Check(name, False, f"has another checksum than {expected.source} says", by_checksum=True)
        if file.suffix == ".safetensors":
            _check_header(file, size)
        if expected is None:
            return Check(name, True, "header and size")
        return Check(name, True, f"checksum of {expected.source}", by_checksum=True)
    except (OSError, ValueError) as error:
        return Check(name, False, " ".join(str(error).split()))


def _check_header(file: Path, size: int) -> None:
    end = max((entry.end for entry in read_header(file).tensors.values()), default=size)
    if end != size:
        raise ValueError(f"{file} has {size} bytes, its tensors end at {end}: copy or download it again")


def _check_whole(path: Path) -> Check | None:
    """What only all files together tell: parts of GGUF, and the index."""
    try:
        if holds_gguf(path) and not (path.is_dir() and any(path.glob("*.safetensors"))):
            with GgufFiles(path) as files:
                return Check("GGUF", True, f"{sum(1 for _ in files)} tensors lie in their files")
        index = path / INDEX
        if not index.is_file():
            return None
        return _check_index(index)
    except (OSError, ValueError, KeyError) as error:
        return Check("GGUF" if holds_gguf(path) else INDEX, False, " ".join(str(error).split()))


def _check_index(index: Path) -> Check:
    weights = parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(weights, dict):
        return Check(INDEX, False, "has no weight_map: download it again")
    names: dict[str, set[str]] = {}
    for tensor, file in weights.items():
        names.setdefault(str(file), set()).add(tensor)
    for file, tensors in sorted(names.items()):
        path = index.parent / file
        if Path(file).name != file or not path.is_file():
            return Check(INDEX, False, f"names {file}, which is missing: download it again")
        if absent := tensors - read_header(path).tensors.keys():
            return Check(INDEX, False, f"says that {file} has {sorted(absent)[0]!r}, which it has not")
    return Check(INDEX, True, f"{len(weights)} tensors are where it says")


def digest(file: Path, like: str, progress: Progress) -> str:
    """SHA-256, or git's SHA-1 of a blob where `like` is as short as that."""
    found = hashlib.sha1(f"blob {file.stat().st_size}\0".encode()) if len(like) == 40 else hashlib.sha256()
    with open(file, "rb") as opened:
        while block := opened.read(_BLOCK):
            found.update(block)
            progress(len(block))
    return found.hexdigest()


def _of_manifest(path: Path) -> dict[Path, Expected]:
    manifest = path / MANIFEST
    if not manifest.is_file():
        return {}
    layers = parse_json(manifest, manifest.read_bytes()).get("layers")
    records = [record for record in (layers.values() if isinstance(layers, dict) else ()) if isinstance(record, dict)]
    return {
        path / str(record["file"]): Expected(str(record["sha256"]), record.get("bytes"), MANIFEST)
        for record in records
        if "file" in record and "sha256" in record
    }


def _of_sums(path: Path) -> dict[Path, Expected]:
    sums = path / SUMS
    if not sums.is_file():
        return {}
    rows = [line.split(maxsplit=1) for line in sums.read_text(errors="replace").splitlines() if line.strip()]
    return {
        path / row[1].lstrip("*").strip(): Expected(row[0].lower(), None, SUMS)
        for row in rows
        if len(row) == 2 and _HEX.fullmatch(row[0].lower())
    }


def _of_download(path: Path) -> dict[Path, Expected]:
    folder = path / METADATA
    found = {}
    for metadata in folder.rglob("*.metadata"):
        lines = metadata.read_text(errors="replace").split()
        if len(lines) >= 2 and _HEX.fullmatch(lines[1]):
            file = path / metadata.relative_to(folder).with_suffix("")
            found[file] = Expected(lines[1], None, "the hub")
    return found


def _of_hub_cache(files: Iterable[Path]) -> dict[Path, Expected]:
    """A file of a snapshot is a link to a blob that is called after its checksum."""
    found = {}
    for file in files:
        blob = file.resolve()
        if blob.parent.name == "blobs" and _HEX.fullmatch(blob.name):
            found[file] = Expected(blob.name, None, "the hub")
    return found
