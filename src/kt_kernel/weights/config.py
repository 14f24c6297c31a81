"""What config.json says about the experts of a model, whatever its family calls it."""

import os
from dataclasses import dataclass
from pathlib import Path

from kt_kernel.weights.gguf_files import holds_gguf
from kt_kernel.weights.tensor_files import parse_json

# Where models with more than text keep what concerns their text, outermost first.
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")

# Ours -> what families call it, first found first.
FIELD_NAMES = {
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_k",
        "moe_top_k",
        "num_selected_experts",
        "top_k_experts",
    ),
    "hidden_size": ("hidden_size",),
    # Families whose layers all have experts call their size intermediate_size.
    "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    "num_layers": ("num_hidden_layers", "num_layers"),
}

_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")

# What gpt-oss computes, g * sigmoid(alpha g) * (u + 1) of clamped g and u. Its config.json calls it silu and leaves out
# alpha; other models name it, or give alpha.
SWIGLUOAI = "swigluoai"
_SWIGLUOAI_MODELS = ("gpt_oss", "openai_privacy_filter")
SWIGLUOAI_LIMIT, SWIGLUOAI_ALPHA = 7.0, 1.702

GELU_TANH = "gelu_tanh"
_GELU_TANH_NAMES = (GELU_TANH, "gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # of transformers, the same function

# What layers of files compute.
COMPUTED = ("silu", SWIGLUOAI, GELU_TANH)


@dataclass(frozen=True)
class ModelConfig:
    model_type: str
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    num_layers: int
    moe_layers: tuple[int, ...]  # the layers that have experts
    activation: str  # this and below: arguments of KTMoEWrapper, which computes those of COMPUTED
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0


def model_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Reads config.json of a model's folder, or the file; without one, the header of GGUF files."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if holds_gguf(path) and (path.is_file() or not file.exists()):
        from kt_kernel.weights.gguf_config import gguf_model_config  # which is made of what is here

        return gguf_model_config(path)
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist; the folder of a model has a config.json")
    whole = parse_json(file, file.read_bytes())
    fields = text_fields(whole)
    sizes = {ours: _size(file, fields, ours) for ours in FIELD_NAMES}
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:
        raise ValueError(
            f"{file}: {sizes['num_experts_per_tok']} experts per token, but there are {sizes['num_experts']}"
        )
    moe_layers = layers_with_experts(file, fields, sizes["num_layers"])
    return ModelConfig(
        str(whole.get("model_type") or fields.get("model_type") or ""),
        *sizes.values(),
        moe_layers,
        *_activation(file, fields),
    )


def _config_beside(path: Path) -> Path:
    return (path if path.is_dir() else path.parent) / "config.json"


def _read_beside(path: Path) -> tuple[Path, dict]:
    """config.json of the folder that weights are in, and what it says about text; nothing if it is not there."""
    file = _config_beside(path)
    return file, text_fields(parse_json(file, file.read_bytes())) if file.exists() else {}


def model_type_beside(path: Path) -> str | None:
    return _read_beside(path)[1].get("model_type")


def checkpoint_format_beside(path: Path) -> str | None:
    """What quantization_config says about how codes are stored: "gptq" or "gptq_v2"."""
    file = _config_beside(path)
    whole = parse_json(file, file.read_bytes()) if file.exists() else {}
    for fields in (whole, text_fields(whole)):
        if isinstance(said := fields.get("quantization_config"), dict):
            return said.get("checkpoint_format")
    return None


def activation_beside(path: Path) -> tuple[str, float, float]:
    """activation, swiglu_limit and swiglu_alpha of ModelConfig."""
    return _activation(*_read_beside(path))


def _activation(file: Path, fields: dict) -> tuple[str, float, float]:
    name = next((str(fields[name]) for name in _ACTIVATIONS if fields.get(name)), "silu")
    limit, alpha = (_number(file, fields, number) for number in ("swiglu_limit", "swiglu_alpha"))
    if name == "silu" and (alpha or fields.get("model_type") in _SWIGLUOAI_MODELS):
        name = SWIGLUOAI
    if name in _GELU_TANH_NAMES:
        name = GELU_TANH
    if name != SWIGLUOAI:
        return name, limit, alpha
    return name, limit or SWIGLUOAI_LIMIT, alpha or SWIGLUOAI_ALPHA


def text_fields(fields: dict) -> dict:
    for name in _NESTED:
        if isinstance(fields.get(name), dict):
            fields = fields[name]
    return fields


def _size(file: Path, fields: dict, ours: str) -> int:
    names = FIELD_NAMES[ours]
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        hint = "; is it a model with experts?" if ours.startswith("num_experts") else ""
        raise ValueError(f"{file} has no {' or '.join(names)}{hint}")
    value = fields[name]
    if isinstance(value, list) and len({repr(item) for item in value}) == 1:
        value = value[0]  # one for each layer, all the same
    if type(value) is not int or value < 1:
        raise ValueError(f"{file}: {name} is {value!r}; needed is one whole number of at least 1")
    return value


def _number(file: Path, fields: dict, name: str) -> float:
    value = fields.get(name) or 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{file}: {name} is {value!r}; needed is a number")
    return float(value)


def layers_with_experts(file: Path | str, fields: dict, total: int) -> tuple[int, ...]:
    try:
        layers = tuple(layer for layer in range(total) if _has_experts(fields, layer, total))
    except (TypeError, ValueError, IndexError, ZeroDivisionError, AttributeError) as error:
        raise ValueError(f"{file}: which layers have experts cannot be read ({error})") from None
    if not layers:
        raise ValueError(f"{file}: none of {total} layers has experts")
    return layers


def _has_experts(fields: dict, layer: int, total: int) -> bool:
    """Every rule that a config gives must hold; a rule that it does not give holds."""

    def given(name: str, default: object) -> object:
        return default if fields.get(name) is None else fields[name]

    # Lists that say it, layer by layer.
    if kinds := given("mlp_layer_types", None):
        return kinds[layer] != "dense"
    if listed := given("moe_layers", None):  # Llama 4
        return layer in listed
    if listed := given("moe_layers_enum", None):  # Step 3
        return layer in [int(item) for item in (listed.split(",") if isinstance(listed, str) else listed)]
    every = given("moe_layer_freq", 1)  # DeepSeek; a list of 0 and 1 in MiMo
    if isinstance(every, list):
        return bool(every[layer])
    last = given("moe_layer_end_index", -1)
    return (
        layer >= max(given("first_k_dense_replace", 0), given("num_dense_layers", 0))  # DeepSeek, GLM; LFM2
        and layer % every == 0
        and layer not in given("mlp_only_layers", ())  # Qwen
        and (layer + 1) % given("decoder_sparse_step", 1) == 0
        and (layer + 1) % given("interleave_moe_layer_step", 1) == 0  # Llama 4
        and layer % given("expert_layer_period", 1) == given("expert_layer_offset", 0)  # Jamba
        and given("moe_layer_start_index", 0) <= layer <= (total - 1 if last == -1 else last)  # Ernie
        and (layer + 1) % given("moe_layer_interval", 1) == 0
    )
