"""What the header of a GGUF file says about its model, in the words of config.py."""

import os
import re
from pathlib import Path

from kt_kernel.weights.config import COMPUTED, GELU_TANH, SWIGLUOAI, SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT, ModelConfig
from kt_kernel.weights.gguf_file import Value
from kt_kernel.weights.gguf_files import GgufFiles

# Architectures whose experts do not compute silu(gate) * up -> what they compute.
_SWIGLUOAI = ("gpt-oss", "minimax-m3")
_OTHERS = {
    "gemma4": GELU_TANH,  # as llama.cpp's gelu is
    "grok": GELU_TANH,
    "kimi-k3": "situ",
    "nemotron_h": "relu squared",
    "nemotron_h_moe": "relu squared",
    "nomic-bert-moe": "gelu",
    "smallthinker": "relu",
}
# Where a limit is given: these clamp the gate before silu, as layers do, the others behind it.
_CLAMP_BEFORE = ("deepseek4", "glm5-next", "hy_v4", "maple")

_EXPERTS = re.compile(r"blk\.(\d{1,9})\.ffn_(?:(?:gate|up|down|gate_up)_exps|(?:gate|up|down)\.\d+)\.weight")


def layers_with_experts(files: GgufFiles) -> list[int]:
    return sorted({int(match[1]) for name in files if (match := _EXPERTS.fullmatch(name))})


def activation_of(files: GgufFiles, layer_idx: int) -> tuple[str, float, float]:
    """activation, swiglu_limit and swiglu_alpha of ModelConfig."""
    architecture = files.architecture
    if architecture in _SWIGLUOAI:
        return SWIGLUOAI, SWIGLUOAI_LIMIT, SWIGLUOAI_ALPHA
    limit = files.field("swiglu_clamp_exp") or 0.0
    if isinstance(limit, list):
        limit = limit[layer_idx] if layer_idx < len(limit) else 0.0
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise ValueError(f"{files.path}: {architecture}.swiglu_clamp_exp is {limit!r}; needed are numbers")
    if limit > 0 and architecture not in _CLAMP_BEFORE:
        return f"silu clamped to {limit:g}", 0.0, 0.0
    return _OTHERS.get(architecture, "silu"), float(limit) if limit > 0 else 0.0, 0.0


def check_activation(files: GgufFiles, layer_idx: int) -> None:
    name = activation_of(files, layer_idx)[0]
    if name not in COMPUTED:
        raise ValueError(
            f"{files.path}: experts of {files.architecture} use {name}; layers compute {', '.join(COMPUTED)} only, and "
            "the results would be wrong"
        )


def gguf_model_config(path: str | os.PathLike[str]) -> ModelConfig:
    """model_config() of a GGUF file, or of a folder of them."""
    with GgufFiles(Path(path)) as files:
        layers = layers_with_experts(files)
        if not layers:
            raise ValueError(f"{path} has no tensors of experts; is it a model with experts?")
        # The width of experts has no field in families without dense layers, or one that means something else.
        down = next(name for name in files if re.fullmatch(rf"blk\.{layers[0]}\.ffn_down(_exps|\.0)\.weight", name))
        shape = files.entry(down).shape
        if len(shape) < 2:
            raise ValueError(f"{files.where(down)} has shape {list(shape)}; it must be a matrix")
        counts = {name: _whole(files, name) for name in ("expert_count", "expert_used_count", "block_count")}
        if counts["expert_used_count"] > counts["expert_count"]:
            raise ValueError(
                f"{path}: {counts['expert_used_count']} experts per token, but there are {counts['expert_count']}"
            )
        return ModelConfig(
            model_type=files.architecture,
            num_experts=counts["expert_count"],
            num_experts_per_tok=counts["expert_used_count"],
            hidden_size=shape[-2],
            moe_intermediate_size=shape[-1],
            num_layers=counts["block_count"],
            moe_layers=tuple(layers),
            **dict(zip(("activation", "swiglu_limit", "swiglu_alpha"), activation_of(files, layers[0]), strict=True)),
        )


def _whole(files: GgufFiles, name: str) -> int:
    value: Value | None = files.field(name)
    if isinstance(value, list) and len(set(value) - {0}) == 1:
        value = max(value)  # one for each layer, 0 where there are no experts
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{files.path}: {files.architecture}.{name} is {value!r}; needed is one whole number of at least 1"
        )
    return value
