"""What a user sets once for all commands: config.yaml, and the table of what may be in it.

Names have dots, config.yaml has nested mappings. Values have the type of the table, whatever they look like as text.
Names that the table does not have, of other versions or programs, are left in the file and otherwise ignored.
"""

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kt_kernel import yaml_file
from kt_kernel.errors import Phrase, UserError
from kt_kernel.folders import config_folder, data_folder

FILE = "config.yaml"

Value = str | int | float | bool | list[str] | dict[str, str] | None

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NOTHING = ("", "auto", "none", "null")


class SettingsError(UserError):
    """A name or a value that the table does not have."""


@dataclass(frozen=True)
class Kind:
    """`parse` takes text, `accepts` what YAML made of the file. Both raise ValueError, or say False."""

    name: Phrase
    parse: Callable[[str], Value]
    accepts: Callable[[object], bool]


def _switch(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(text)
    return text.lower() in _TRUE


def _structure(kind: type, text: str) -> Value:
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(text) from None
    if kind is list and not isinstance(found, list):
        found = text.split(",") if text else []  # the plain way to write a list
    if not isinstance(found, kind):
        raise ValueError(text)
    if kind is list:
        return [str(item).strip() for item in found]
    return {str(name): str(value) for name, value in found.items()}


def _is_plain(found: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(found, kind) and not isinstance(found, bool)


TEXT = Kind(Phrase("a text"), str, lambda found: isinstance(found, str))
WHOLE = Kind(Phrase("a whole number"), int, lambda found: _is_plain(found, int))
NUMBER = Kind(Phrase("a number"), float, lambda found: _is_plain(found, (int, float)))
SWITCH = Kind(Phrase("yes or no"), _switch, lambda found: isinstance(found, bool))
TEXTS = Kind(
    Phrase("a list, as in 'a,b'"),
    lambda text: _structure(list, text),
    lambda found: isinstance(found, str) or (isinstance(found, list) and all(isinstance(item, str) for item in found)),
)
NAMES = Kind(
    Phrase("names with values, as in '{A: 1, B: x}'"),
    lambda text: _structure(dict, text),
    lambda found: isinstance(found, dict),
)


@dataclass(frozen=True)
class Setting:
    kind: Kind
    default: Value  # None: nothing is said, whoever asks chooses
    about: str
    choices: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None


_COUNT = (1, 2**31 - 1)
_ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "SGLANG_ENABLE_JIT_DEEPGEMM": "0"}

SETTINGS = {
    "general.language": Setting(TEXT, "auto", "Language of kt; auto is that of the system.", ("auto", "en", "zh")),
    "general.color": Setting(SWITCH, True, "Colours on a terminal."),
    "paths.models": Setting(TEXTS, [], "Folders with models; downloads go into the first (default: kt's own)."),
    "paths.weights": Setting(TEXT, "", "Where kt quant writes (default: beside the model)."),
    "server.host": Setting(TEXT, "127.0.0.1", "Where servers listen, and where kt chat looks for one."),
    "server.port": Setting(WHOLE, 8000, "Port of servers.", bounds=(0, 65535)),
    "inference.tensor_parallel_size": Setting(WHOLE, None, "GPUs that share a model.", bounds=_COUNT),
    "inference.cpu_threads": Setting(WHOLE, None, "Threads for experts.", bounds=_COUNT),
    "inference.numa_nodes": Setting(WHOLE, None, "NUMA nodes that hold experts.", bounds=_COUNT),
    "inference.gpu_experts": Setting(WHOLE, None, "Experts of each layer on the GPU.", bounds=(0, 2**31 - 1)),
    "inference.kt_method": Setting(TEXT, None, "Method of the experts."),
    "inference.kt_gpu_prefill_token_threshold": Setting(
        WHOLE, None, "Prompts of this many tokens have their experts computed on the GPU.", bounds=(0, 2**31 - 1)
    ),
    "inference.attention_backend": Setting(TEXT, None, "SGLang's attention."),
    "inference.max_total_tokens": Setting(WHOLE, None, "Tokens of all requests together.", bounds=_COUNT),
    "inference.max_running_requests": Setting(WHOLE, None, "Requests at once.", bounds=_COUNT),
    "inference.chunked_prefill_size": Setting(WHOLE, None, "Tokens of a piece of a prompt.", bounds=_COUNT),
    "inference.mem_fraction_static": Setting(
        NUMBER, None, "Share of the GPU's memory for weights and KV cache.", bounds=(0.05, 1)
    ),
    "inference.watchdog_timeout": Setting(NUMBER, None, "Seconds after which SGLang gives up a step.", bounds=_COUNT),
    "inference.served_model_name": Setting(TEXT, None, "What clients call the model."),
    "inference.disable_shared_experts_fusion": Setting(SWITCH, None, "Keep shared experts apart from the others."),
    "inference.env": Setting(NAMES, _ENVIRONMENT, "Environment of SGLang."),
    "download.mirror": Setting(TEXT, "", "Address of a mirror of huggingface.co, as in https://hf-mirror.com."),
    "download.verify": Setting(SWITCH, True, "Compare what was downloaded with the hub's checksums."),
    "advanced.env": Setting(NAMES, {}, "Environment of every server, before that of inference.env."),
    "advanced.sglang_args": Setting(TEXTS, [], "Options that SGLang gets as they are."),
}


def path() -> Path:
    return config_folder() / FILE


def get(name: str) -> Value:
    """The value of the file, or the default. UserError also where the file has something else than the table says."""
    return _value(name, _setting(name), yaml_file.read(path()))


def everything() -> dict[str, Value]:
    content = yaml_file.read(path())
    return {name: _value(name, setting, content) for name, setting in SETTINGS.items()}


def is_set(name: str) -> bool:
    """Whether the file says something about it."""
    _setting(name)
    return _lookup(yaml_file.read(path()), name) is not None


def set(name: str, text: str) -> Value:
    """Parses the text as the table says, and writes it."""
    value = _parsed(name, _setting(name), text.strip())
    assign(name, value)
    return value


def assign(name: str, value: Value) -> None:
    """Writes a value that has the type of the table already."""
    setting = _setting(name)
    if value is not None and not setting.kind.accepts(value):
        raise _refused(name, setting, str(value))
    with yaml_file.changed(path()) as content:
        *folders, last = name.split(".")
        for folder in folders:
            if not isinstance(content.get(folder), dict):
                content[folder] = {}
            content = content[folder]
        content[last] = value


def as_text(value: Value) -> str:
    """As `set` takes it."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        return value
    return ",".join(value) if isinstance(value, list) else json.dumps(value, ensure_ascii=False)


def reset(name: str | None = None) -> None:
    """Back to the default, of one setting or of all that the table has."""
    names = SETTINGS if name is None else [name]
    for one in names:
        _setting(one)
    if not path().exists():
        return
    with yaml_file.changed(path()) as content:
        for one in names:
            _remove(content, one.split("."))


def model_folders() -> list[Path]:
    """Where models are looked for; downloads go into the first."""
    named = get("paths.models")
    named = [named] if isinstance(named, str) else named
    return [Path(folder).expanduser() for folder in named] or [data_folder() / "models"]


def _setting(name: str) -> Setting:
    if name not in SETTINGS:
        last = name.rpartition(".")[2]
        near = (
            difflib.get_close_matches(name, SETTINGS, 3, 0.6) or [key for key in SETTINGS if last and last in key][:3]
        )
        if near:
            raise SettingsError("no setting is called '{name}'; is it {near}?", name=name, near=", ".join(near))
        raise SettingsError("no setting is called '{name}'; there are {names}", name=name, names=", ".join(SETTINGS))
    return SETTINGS[name]


def _parsed(name: str, setting: Setting, text: str) -> Value:
    if setting.default is None and text.lower() in _NOTHING:
        return None
    try:
        value = setting.kind.parse(text)
    except ValueError:
        raise _refused(name, setting, text) from None
    if not _in_range(setting, value):
        raise _refused(name, setting, text)
    return value


def _refused(name: str, setting: Setting, text: str) -> SettingsError:
    return SettingsError("{name} cannot be '{text}': needed is {legal}", name=name, text=text, legal=_legal(setting))


def _legal(setting: Setting) -> Phrase:
    if setting.choices:
        return Phrase("one of {choices}", choices=", ".join(setting.choices))
    if setting.bounds:
        low, high = (f"{bound:g}" if bound < 1e6 else str(bound) for bound in setting.bounds)
        return Phrase("{kind} from {low} to {high}", kind=setting.kind.name, low=low, high=high)
    return setting.kind.name


def _in_range(setting: Setting, value: Value) -> bool:
    if setting.choices:
        return value in setting.choices
    return setting.bounds is None or setting.bounds[0] <= value <= setting.bounds[1]


def _lookup(content: dict, name: str) -> object:
    found: object = content
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _value(name: str, setting: Setting, content: dict) -> Value:
    found = _lookup(content, name)
    if found is None:
        return setting.default.copy() if isinstance(setting.default, list | dict) else setting.default
    if not setting.kind.accepts(found) or not _in_range(setting, found):
        raise SettingsError(
            "{file}: {name} is {found}, needed is {legal}: correct it, or 'kt config reset {name}'",
            file=path(),
            name=name,
            found=repr(found),
            legal=_legal(setting),
        )
    if setting.kind is NAMES:
        return {str(key): str(value) for key, value in found.items()}
    return [found] if setting.kind is TEXTS and isinstance(found, str) else found


def _remove(content: dict, parts: list[str]) -> None:
    first, *rest = parts
    if not rest:
        content.pop(first, None)
    elif isinstance(content.get(first), dict):
        _remove(content[first], rest)
        if not content[first]:
            del content[first]
