"""What a user sets once for all commands: config.yaml, and the table of what may be in it.

Names have dots, config.yaml has nested mappings. Values have the type of the table, whatever they look like as text.
Names that the table does not have, of other versions or programs, are left in the file and otherwise ignored.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kt_kernel import yaml_file
from kt_kernel.errors import UserError
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

    name: str
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


TEXT = Kind("a text", str, lambda found: isinstance(found, str))
WHOLE = Kind("a whole number", int, lambda found: _is_plain(found, int))
NUMBER = Kind("a number", float, lambda found: _is_plain(found, (int, float)))
SWITCH = Kind("yes or no", _switch, lambda found: isinstance(found, bool))
TEXTS = Kind(
    "texts, as in 'a,b' or '[a, b]'",
    lambda text: _structure(list, text),
    lambda found: isinstance(found, str) or (isinstance(found, list) and all(isinstance(item, str) for item in found)),
)
NAMES = Kind(
    "names with values, as in '{A: 1, B: x}'",
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
    "general.verbose": Setting(SWITCH, False, "Say more, as -v does."),
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
    setting = _setting(name)
    value = _parsed(name, setting, text.strip())
    with yaml_file.changed(path()) as content:
        *folders, last = name.split(".")
        for folder in folders:
            if not isinstance(content.get(folder), dict):
                content[folder] = {}
            content = content[folder]
        content[last] = value
    return value


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
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(SETTINGS)}"
        raise SettingsError(f"no setting is called '{name}'; {hint}")
    return SETTINGS[name]


def _parsed(name: str, setting: Setting, text: str) -> Value:
    if setting.default is None and text.lower() in _NOTHING:
        return None
    try:
        value = setting.kind.parse(text)
    except ValueError:
        raise SettingsError(f"{name} cannot be '{text}': it is {_legal(setting)}") from None
    if not _in_range(setting, value):
        raise SettingsError(f"{name} cannot be '{text}': it is {_legal(setting)}")
    return value


def _legal(setting: Setting) -> str:
    if setting.choices:
        return " or ".join(setting.choices)
    if setting.bounds:
        return f"{setting.kind.name} from {setting.bounds[0]:g} to {setting.bounds[1]:g}"
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
            f"{path()}: {name} is {found!r}, but must be {_legal(setting)}: correct it, or 'kt config reset {name}'"
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
