"""A tiny model of every architecture of the installed transformers that lets others compute its experts.

Architectures are found by scanning the package. Configs are shrunk by the names of their fields (SMALL), sub-configs
too; OVERRIDES has what a family needs besides.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

HIDDEN, EXPERTS, TOP_K, LAYERS, VOCABULARY = 64, 8, 2, 2, 64

# Field -> its small value; fields whose default is None or 0 stay so, unless they are of EXPERT_FIELDS.
SMALL = {
    **dict.fromkeys(["hidden_size", "embed_dim", "d_model", "out_hidden_size", "moe_hidden_size"], HIDDEN),
    **dict.fromkeys(
        ["num_hidden_layers", "num_layers", "depth", "n_layers", "encoder_layers", "decoder_layers"], LAYERS
    ),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "encoder_ffn_dim", "mlp_dim", "d_inner"], 96),
    **dict.fromkeys(["shared_expert_intermediate_size", "shared_intermediate_size"], 32),
    **dict.fromkeys(["num_attention_heads", "num_heads", "n_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_global_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "global_head_dim"], 16),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "o_lora_rank", "projection_dim"], 16),
    **dict.fromkeys(["qk_rope_head_dim"], 8),
    **dict.fromkeys(["index_n_heads"], 2),
    **dict.fromkeys(["index_topk"], 4),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"], 1),
    **dict.fromkeys(["moe_layer_start_index", "expert_layer_offset"], 0),
    **dict.fromkeys(["expert_layer_period"], 1),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads"], 2),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 16),
    **dict.fromkeys(["mamba_d_state", "ssm_state_size", "mamba_dt_rank"], 4),
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], VOCABULARY),
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], 0),
    **dict.fromkeys(["max_position_embeddings", "sliding_window"], 128),
    **dict.fromkeys(["num_nextn_predict_layers", "num_mtp_layers"], 0),
}

EXPERT_FIELDS = {
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"], EXPERTS),
    **dict.fromkeys(
        ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"], TOP_K
    ),
    **dict.fromkeys(["moe_intermediate_size", "expert_ffn_hidden_size"], 48),
    "mlp_layer_types": ["sparse"] * LAYERS,
}

# Of configs with latent attention.
LATENT_FIELDS = {"num_key_value_heads": 4, "head_dim": 8}


def _rope(sections: list[int], part: float) -> dict:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, "partial_rotary_factor": part}


_HYBRID = ["linear_attention", "full_attention"]
# Architecture -> fields, of sub-configs in dictionaries; None leaves a field to its config.
OVERRIDES: dict[str, dict] = {
    "bailing_hybrid": {"layer_types": _HYBRID},
    "deepseek_v4": {"mlp_layer_types": None},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [48, 32], "rope_parameters": _rope([2, 2, 4], 1.0)},
    },
    "flint": {"mlp_only_layers": []},
    "gemma4": {"text_config": {"enable_moe_block": True}},
    "glm4v_moe": {"text_config": {"rope_parameters": _rope([1, 1, 2], 0.5)}},
    "glm5_next": {
        "text_config": {"index_kpool": 2, "layer_types": ["linear_attention", "indexed_attention"]},
        "vision_config": {"projection_intermediate_size": 32},
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _HYBRID},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "muse_spark": {
        "projector_hidden_size": HIDDEN,
        "audio_config": {"hidden_sizes": [16, 16], "depths": [1, 1], "patch_sizes": [16, 6]},
    },
    "qwen3_5_moe": {"text_config": {"layer_types": _HYBRID}},
    "qwen3_next": {"layer_types": _HYBRID},
    "qwen4_exp": {
        "text_config": {
            "layer_types": _HYBRID,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        },
    },
    "zaya": {"num_experts_per_tok": 1},
}

_TASKS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)


# Whose first choice cannot be built: inkling_mm_model wants scipy.
_INSTEAD = {"inkling": ("inkling_text", "MODEL_FOR_CAUSAL_LM_MAPPING")}


class Architecture(NamedTuple):
    name: str  # the folder of its code
    model_type: str
    task: str


def architectures() -> list[Architecture]:
    """Of each the first task that it has a class for; of several configs the one that is named as the folder."""
    folder = Path(transformers.__file__).parent / "models"
    files = sorted(folder.glob("*/modeling_*.py"))
    used = (file for file in files if "\n@use_experts_implementation" in file.read_text())
    found = []
    for name in dict.fromkeys(file.parent.name for file in used):
        types = [kind for kind in CONFIG_MAPPING_NAMES if model_type_to_module_name(kind) == name]
        types.sort(key=lambda kind, name=name: kind != name)
        pairs = ((kind, task) for task in _TASKS for kind in types if kind in getattr(modeling_auto, f"{task}_NAMES"))
        found.append(Architecture(name, *(_INSTEAD.get(name) or next(pairs, (name, "")))))
    return found


def tiny_config(architecture: Architecture):
    default = AutoConfig.for_model(architecture.model_type)
    fields = _small_fields(default, OVERRIDES.get(architecture.name, {}))
    return AutoConfig.for_model(architecture.model_type, **fields)


def _small_fields(config, overrides: dict) -> dict:
    """Arguments that make a small config of the same class."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    fields = {name: value for name, value in SMALL.items() if defaults.get(name)}
    if "kv_lora_rank" in fields:
        fields |= {name: value for name, value in LATENT_FIELDS.items() if defaults.get(name)}
    fields |= {name: value for name, value in EXPERT_FIELDS.items() if name in defaults}
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            fields[name] = {"model_type": inner.model_type, **_small_fields(inner, overrides.get(name, {}))}
    fields |= {name: value for name, value in overrides.items() if name not in config.sub_configs}
    return {name: value for name, value in fields.items() if value is not None}


def build(architecture: Architecture, seed: int = 0):
    """The model in float32, its matrices random and so large that experts and routing matter."""
    config = tiny_config(architecture)
    torch.manual_seed(seed)
    classes = getattr(modeling_auto, architecture.task)[type(config)]
    return randomise((classes[0] if isinstance(classes, tuple) else classes)(config), seed)


def randomise(model, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Those of experts have three dimensions.
                parameter.normal_(0, 0.2 if parameter.dim() == 2 else 0.4, generator=generator)
    return model.float().eval()


def tokens(count: int = 9) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(3))


def logits(model, ids: torch.Tensor | None = None) -> torch.Tensor:
    torch.manual_seed(0)  # block diffusion begins with random tokens
    with torch.no_grad():
        output = model(input_ids=tokens() if ids is None else ids)
    return output.logits if hasattr(output, "logits") else output[0]


def eager_logits(model) -> torch.Tensor:
    """Those of transformers' own loop over experts."""
    model.set_experts_implementation("eager")
    return logits(model)


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """|error| / |expected| of the median token: one whose router found two experts equally good may take the other."""
    errors = (result.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(errors.median())
