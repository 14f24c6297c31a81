"""user_models.yaml: the models that a user added, each with a name and where it is.

Files of earlier versions of kt are read and kept: fields that are not ours stay as they are.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path

from kt_kernel import yaml_file
from kt_kernel.errors import UserError
from kt_kernel.folders import config_folder
from kt_kernel.yaml_file import YamlFileError

FILE = "user_models.yaml"
_VERSION = "1.0"
_NAME = re.compile(r"\w[\w.+-]*")  # no path, no option, and one word in every shell
_TAKEN = ("demo",)


@dataclass(frozen=True)
class UserModel:
    name: str
    path: str
    format: str = "safetensors"  # or gguf
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    repo_id: str | None = None
    repo_type: str | None = None  # huggingface
    sha256_status: str = "not_checked"  # passed, failed
    created_at: str = field(default_factory=lambda: now())
    last_verified: str | None = None
    is_moe: bool | None = None
    moe_num_experts: int | None = None
    moe_num_experts_per_tok: int | None = None
    amx_quant_method: str | None = None  # of converted weights
    others: dict[str, object] = field(default_factory=dict)  # fields of other versions


_OURS = tuple(entry.name for entry in fields(UserModel) if entry.name != "others")


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def path() -> Path:
    return config_folder() / FILE


def user_models() -> list[UserModel]:
    return _models(yaml_file.read(path()))


def get(name: str) -> UserModel | None:
    return next((model for model in user_models() if model.name.lower() == name.lower()), None)


def add(model: UserModel) -> None:
    """UserError where the name is taken, or cannot be one."""
    if model.name in _TAKEN or not _NAME.fullmatch(model.name):
        raise UserError(
            "a model cannot be called '{name}': choose letters, digits, '.', '-', '_', '+'", name=model.name
        )
    with _changed() as models:
        if any(other.name.lower() == model.name.lower() for other in models):
            raise UserError(
                "a model is called '{name}' already: give another name with --name, or 'kt model remove {name}'",
                name=model.name,
            )
        models.append(model)


def remove(name: str) -> UserModel | None:
    """Takes it off the list; its files stay. None: no model is called that."""
    with _changed() as models:
        found = next((model for model in models if model.name.lower() == name.lower()), None)
        if found is not None:
            models.remove(found)
    return found


def update(name: str, **values: object) -> None:
    with _changed() as models:
        models[:] = [replace(model, **values) if model.name == name else model for model in models]


def _models(content: dict) -> list[UserModel]:
    entries = content.get("models") or []
    if not isinstance(entries, list):
        raise YamlFileError("{path}: 'models' must be a list: correct it, or move it away", path=path())
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("name", "path")):
            raise YamlFileError("{path}: a model lacks name or path: correct it, or move it away", path=path())
    return [
        UserModel(
            **{name: entry[name] for name in _OURS if name in entry},
            others={name: value for name, value in entry.items() if name not in _OURS},
        )
        for entry in entries
    ]


@contextmanager
def _changed() -> Iterator[list[UserModel]]:
    with yaml_file.changed(path()) as content:
        models = _models(content)
        yield models
        content.setdefault("version", _VERSION)
        content["models"] = [_entry(model) for model in models]


def _entry(model: UserModel) -> dict[str, object]:
    entry = asdict(model)
    return entry | entry.pop("others")
