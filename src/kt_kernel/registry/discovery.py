"""Models on this machine: added ones, those in the folders of models, those in the cache of huggingface_hub."""

import os
from collections.abc import Iterator
from pathlib import Path

from kt_kernel import settings
from kt_kernel.convert.folder import MANIFEST
from kt_kernel.registry import user_models
from kt_kernel.registry.find import Found, hub_cache
from kt_kernel.weights.gguf_files import models_in

_LISTED_DEPTH = 2  # of a folder of models: NAME, or ORG/NAME


def local_models() -> list[Found]:
    """Each place once, under the name that it was given, else that of its folder. Those that were added come first."""
    found = [Found(model.name, Path(model.path), model.repo_id) for model in user_models.user_models()]
    places = {_place(model.path) for model in found}
    for path in [place for folder in settings.model_folders() for place in models_below(folder, _LISTED_DEPTH)]:
        if _place(path) not in places:
            places.add(_place(path))
            found.append(Found(_name(path), path))
    for path, repo in hub_snapshots():
        if _place(path) not in places:
            places.add(_place(path))
            found.append(Found(repo.partition("/")[2], path, repo))
    return found


def models_below(folder: Path, depth: int) -> Iterator[Path]:
    """Folders of models, and files of GGUF models, in this folder and `depth` folders below it."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        models = _models_at(folder, {entry.name for entry in entries})
    except OSError:  # not there, or not ours to read
        return
    yield from models
    if depth == 0 or folder in models:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from models_below(Path(entry.path), depth - 1)


def _models_at(folder: Path, names: set[str]) -> list[Path]:
    if MANIFEST in names or ("config.json" in names and any(name.endswith(".safetensors") for name in names)):
        return [folder]
    first_parts = models_in(folder) if any(name.lower().endswith(".gguf") for name in names) else []
    return [folder] if len(first_parts) == 1 else first_parts


def hub_snapshots() -> Iterator[tuple[Path, str]]:
    """What refs/main of each model in the cache names, and the model's id."""
    for folder in sorted(hub_cache().glob("models--*--*")):
        try:
            snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
            names = {entry.name for entry in os.scandir(snapshot)}
        except OSError:
            continue
        if any(name.endswith((".safetensors", ".gguf")) for name in names):
            yield snapshot, folder.name.removeprefix("models--").replace("--", "/", 1)


def _place(path: Path) -> Path:
    return path.expanduser().resolve()


def _name(path: Path) -> str:
    return path.stem if path.is_file() else path.name
