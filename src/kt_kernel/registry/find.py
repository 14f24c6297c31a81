"""From what a user typed to a model: 'demo', a path, a name that was added, a known name or alias, an id of the hub.

A word without a slash is a name first; './word' is a folder. Whatever is found by name is looked for on this machine
too: where it was added, in the folders of models, in the cache of huggingface_hub.
"""

import difflib
import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kt_kernel import env, settings
from kt_kernel.errors import Phrase, UserError
from kt_kernel.registry import user_models
from kt_kernel.registry.known import Known, known_models

DEMO = "demo"
_REPO = re.compile(r"[\w.-]+/[\w.-]+")


class UnknownModelError(UserError):
    """`nearest`: names that look like it."""

    def __init__(self, text: str, nearest: list[str]):
        hint = Phrase("'kt model list --all' shows names; a folder, or a hub id (org/name), will do too")
        if nearest:
            hint = Phrase("did you mean {names}?", names=", ".join(nearest))
        super().__init__("no model is called '{name}'; {hint}", name=text, hint=hint)
        self.text, self.nearest = text, nearest


@dataclass(frozen=True)
class Found:
    name: str
    path: Path | None = None  # None: not on this machine; the demo model is made when it is asked for
    repo: str | None = None
    known: Known | None = None


def find(text: str) -> Found:
    """UnknownModelError where nothing fits, UserError where it is a path that does not exist."""
    if text == DEMO:
        return Found(DEMO)
    if _is_path(text):
        return _at(text)
    if added := user_models.get(text):
        if not Path(added.path).exists():
            raise UserError(
                "'{name}' was in {path}, which is gone: 'kt model remove {name}', or bring it back",
                name=added.name,
                path=added.path,
            )
        return Found(added.name, Path(added.path), added.repo_id, _of_repo(added.repo_id))
    if known := _by_name(text):
        return Found(known.name, local_copy(known.repo), known.repo, known)
    if path := _in_folders(text) or (Path(text).absolute() if Path(text).exists() else None):
        return Found(path.stem if path.is_file() else path.name, path)
    if repo := text if _REPO.fullmatch(text) else _cached_repo(text):
        known = _of_repo(repo)
        repo = known.repo if known else repo
        return Found(known.name if known else repo.partition("/")[2], local_copy(repo), repo, known)
    raise UnknownModelError(text, _nearest(text))


def download_folder(repo: str) -> Path:
    """Where a download of it goes, unless somebody says otherwise."""
    return settings.model_folders()[0] / repo.partition("/")[2]


def local_copy(repo: str) -> Path | None:
    """Where a model of the hub is on this machine."""
    for model in user_models.user_models():
        if (model.repo_id or "").lower() == repo.lower() and Path(model.path).exists():
            return Path(model.path)
    return _in_folders(repo) or _in_folders(repo.partition("/")[2]) or _in_hub_cache(repo)


def _is_path(text: str) -> bool:
    if text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        return True
    # 'org/name' may be a folder below this one; if it is there, it is meant.
    return "/" in text and (Path(text).exists() or not _REPO.fullmatch(text))


def _at(text: str) -> Found:
    path = Path(text).expanduser().absolute()
    if not path.exists():
        raise UserError("'{path}' does not exist: give the folder of a model, or a GGUF file", path=text)
    path = Path(os.path.normpath(path))
    added = next((model for model in user_models.user_models() if Path(model.path) == path), None)
    repo = added.repo_id if added else None
    return Found(added.name if added else path.name, path, repo, _of_repo(repo) or _by_name(path.name, aliases=False))


def _by_name(text: str, aliases: bool = True) -> Known | None:
    """By its name, an alias, or the name that it has on the hub. A folder that is called m2 may be anything."""
    wanted = text.lower()
    models = known_models()
    named = (model for model in models if model.name.lower() == wanted)
    aliased = (model for model in models if aliases and wanted in map(str.lower, model.aliases))
    repos = (model for model in models if model.repo.lower().partition("/")[2] == wanted)
    return next(named, None) or next(aliased, None) or next(repos, None)


def _of_repo(repo: str | None) -> Known | None:
    return next((model for model in known_models() if repo and model.repo.lower() == repo.lower()), None)


def _in_folders(name: str) -> Path | None:
    """As NAME, ORG/NAME or NAME.gguf in a folder of models, or one folder below."""
    for folder in settings.model_folders() if name else ():
        for place in [folder / name, *sorted(folder.glob(f"*/{glob.escape(name)}"))]:
            if holds_model(place):
                return place
        for pattern in (f"{glob.escape(name)}.gguf", f"*/{glob.escape(name)}.gguf"):
            if found := sorted(folder.glob(pattern)):
                return found[0]
    return None


def holds_model(path: Path) -> bool:
    """A folder with weights of a model, all or some. Caches often have config.json alone, which is none."""
    return path.is_dir() and any(any(path.glob(kind)) for kind in ("*.safetensors", "*.gguf", "_layer_*"))


def hub_cache() -> Path:
    return Path(env.hub_cache() or "~/.cache/huggingface/hub").expanduser()


def _in_hub_cache(repo: str) -> Path | None:
    folder = hub_cache() / f"models--{repo.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if revision and holds_model(snapshot) else None


def _cached_repo(name: str) -> str | None:
    """The id of a model in the cache, by its name alone."""
    folders = hub_cache().glob(f"models--*--{glob.escape(name)}")
    repos = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in sorted(folders)]
    return next((repo for repo in repos if repo.partition("/")[2] == name and _in_hub_cache(repo)), None)


def _nearest(text: str) -> list[str]:
    names: dict[str, str] = {DEMO: DEMO}
    for model in known_models():
        names |= {word.lower(): word for word in (model.name, *model.aliases)}
    names |= {model.name.lower(): model.name for model in user_models.user_models()}
    wanted = text.lower()
    near = difflib.get_close_matches(wanted, names, 3, 0.6)
    near += [name for name in names if wanted in name and name not in near]
    return [names[name] for name in near[:3]]
