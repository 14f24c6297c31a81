"""Toy models of many families, made and saved by transformers. Run as a program, so that no test has to import it.

python family_models.py FOLDER writes for each family
  FOLDER/{family}/hub/               what save_pretrained writes: the names of the family on the hub
  FOLDER/{family}/memory/            the names that transformers 5 uses in memory, which it can also save
  FOLDER/{family}/reference.safetensors
      {layer}.gate, .up, .down       [E, I, H], [E, I, H], [E, H, I], from the parameters of the model
      {layer}.gate_bias, and so on   [E, I], [E, I], [E, H], of BIASED
      {layer}.x, .ids, .weights      tokens and a random routing
      {layer}.experts                what the model's own experts, in f32, make of them
      {layer}.router, .block         of BLOCKS: weights of the router, and what the whole block makes of x
  FOLDER/gpt_oss/mxfp4/              the same weights as the files of gpt-oss have them
"""

import os
import sys
from pathlib import Path

HIDDEN, EXPERTS, TOP_K, LAYERS = 64, 8, 2, 2

_TEXT = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 32,
    "intermediate_size": 96,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": 48, "norm_topk_prob": True}
_SHARED = {**_QWEN, "shared_expert_intermediate_size": 32}
_LOCAL = {"num_local_experts": EXPERTS}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_DEEPSEEK = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": HIDDEN}
_TOWER = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 14,
}
_INDEX = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}

# model_type -> its own part of the config; with text_config, a model that also sees.
FAMILIES = {
    "qwen2_moe": _SHARED,
    "qwen3_moe": {**_QWEN, "mlp_only_layers": [0]},
    "qwen3_next": _SHARED,
    "qwen3_5_moe_text": _SHARED,
    "qwen3_vl_moe": {
        "text_config": {**_TEXT, **_QWEN},
        "vision_config": {**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "qwen3_5_moe": {
        "text_config": {**_TEXT, **_SHARED},
        "vision_config": {**_VISION, "num_position_embeddings": 16},
    },
    "deepseek_v2": {**_DEEPSEEK, **_LATENT, "num_key_value_heads": 4},
    "deepseek_v3": {**_DEEPSEEK, **_LATENT, "num_key_value_heads": 4},
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": {**_DEEPSEEK, **_LATENT, "num_key_value_heads": 4},
    "glm4v_moe": {
        "text_config": {**_TEXT, **_DEEPSEEK},
        "vision_config": {**_VISION, "image_size": 28, "patch_size": 14},
    },
    "dots1": {**_DEEPSEEK, "n_shared_experts": 1, "layer_types": ["full_attention"] * LAYERS},
    "olmoe": {"num_experts": EXPERTS, "dtype": "float32"},
    "flex_olmo": {"num_experts": EXPERTS},
    "mixtral": {**_LOCAL, "dtype": "float16"},
    "minimax": {**_LOCAL, "layer_types": ["full_attention"] * LAYERS},
    "minimax_m2": _LOCAL,
    "phimoe": _LOCAL,
    "granitemoe": _LOCAL,
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 32},
    "granitemoehybrid": {
        **_LOCAL,
        "shared_intermediate_size": 32,
        "layer_types": ["attention"] * LAYERS,
    },
    "llama4_text": {**_LOCAL, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2},
    "jamba": {
        "num_experts": EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 0,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "lfm2_moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
        "layer_types": ["full_attention"] * LAYERS,
    },
    "ernie4_5_moe": {
        "moe_num_experts": EXPERTS,
        "moe_k": TOP_K,
        "moe_intermediate_size": 48,
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_moe": {"num_experts": EXPERTS, "moe_topk": TOP_K},
    "afmoe": {"num_experts": EXPERTS, "moe_intermediate_size": 48, "num_dense_layers": 1},
    "kimi_linear": {
        "num_experts": EXPERTS,
        "num_experts_per_token": TOP_K,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        **_LATENT,
    },
    "mimo_v2_flash": _DEEPSEEK,
    "exaone_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 48},
    "deepseek_v4": {"n_routed_experts": EXPERTS, "swiglu_limit": 0.5},  # so small that it matters
    "deepseek_v32": {**_DEEPSEEK, **_LATENT, **_INDEX, "num_key_value_heads": 4},
    "glm_moe_dsa": {**_DEEPSEEK, **_LATENT, **_INDEX, "num_key_value_heads": 4},
    "kimi_k25": {
        "text_config": {**_TEXT, **_DEEPSEEK, **_LATENT, "model_type": "deepseek_v3", "num_key_value_heads": 4},
        "vision_config": _TOWER,
    },
    "llama4": {
        "text_config": {**_TEXT, **_LOCAL, "interleave_moe_layer_step": 1},
        "vision_config": {
            **_TOWER,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "image_size": 28,
        },
    },
    "minimax_m3_vl": {"text_config": {**_TEXT, **_LOCAL}, "vision_config": _TOWER},
    "aria_text": {"moe_num_experts": EXPERTS, "moe_topk": TOP_K},
    "hy_v3": {"num_experts": EXPERTS, "moe_intermediate_size": 48},
    "bailing_hybrid": {**_DEEPSEEK, **_LATENT, "num_experts": EXPERTS},
    "solar_open": {**_DEEPSEEK, "first_k_dense_replace": 0},
    "cohere2_moe": {"num_experts": EXPERTS},
    "jetmoe": _LOCAL,
    "gpt_oss": {**_LOCAL, "swiglu_limit": 0.5},
    "openai_privacy_filter": {**_LOCAL, "swiglu_limit": 0.5},
}
BIASED = ("gpt_oss", "openai_privacy_filter")
SWIGLUOAI = (*BIASED, "minimax_m3_vl")
MISNAMED = ("kimi_k25",)  # transformers 5.22 saves its layers as `blocks`, which the hub does not have
ALONE = ("jetmoe",)  # experts do not run without their router
BLOCKS = ("qwen3_moe", "mixtral", "granitemoe")  # their blocks are router and experts, nothing else


def _make(family: str, arguments: dict):
    import torch
    import transformers

    sees = "text_config" in arguments
    config = transformers.AutoConfig.for_model(family, **(arguments if sees else {**_TEXT, **arguments}))
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    if family == "openai_privacy_filter":
        auto = transformers.AutoModelForTokenClassification
    model = auto.from_config(config, dtype=getattr(torch, arguments.get("dtype", "bfloat16")))
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
        if family == "gpt_oss":
            for name, parameter in model.named_parameters():
                if name.endswith(MXFP4):
                    parameter.copy_(_to_mxfp4(parameter)[2])
    return model


MXFP4 = ("experts.gate_up_proj", "experts.down_proj")


def _to_mxfp4(turned) -> tuple:
    """Blocks, scales and what they mean, of [E, K, N]: groups of 32 k, the largest code is 6 = 1.5 * 2^2."""
    import torch

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = turned.detach().float().transpose(1, 2).unflatten(2, (-1, 32))  # [E, N, G, 32]
    exponents = groups.abs().amax(3).log2().floor() - 2
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1)
    meaning = scaled.sign() * values[codes] * exponents.exp2()[..., None]
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks, (exponents + 127).to(torch.uint8), meaning.flatten(2).transpose(1, 2).contiguous()


def _save_mxfp4(source: Path, target: Path) -> None:
    import safetensors.torch

    tensors = {}
    for name, tensor in safetensors.torch.load_file(source / "model.safetensors").items():
        if name.endswith(MXFP4):
            blocks, scales, meaning = _to_mxfp4(tensor)
            assert (meaning == tensor.float()).all()
            tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales}
        else:
            tensors[name] = tensor
    target.mkdir()
    safetensors.torch.save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())


def _matrices(experts) -> list:
    """gate, up and down of a module of experts."""
    if hasattr(experts, "input_linear"):
        both, down = experts.input_linear.weight, experts.output_linear.weight
    else:
        both, down = experts.gate_up_proj, experts.down_proj
    if both.shape[1] == HIDDEN:  # no toy has H = 2I
        both, down = both.transpose(1, 2), down.transpose(1, 2)
    return [*_halves(experts, both), down]


def _halves(experts, both) -> tuple:
    """Of gate and up [E, 2I, ...]."""
    if type(experts).__name__ == "GptOssExperts":
        return both[:, ::2], both[:, 1::2]
    return both.chunk(2, dim=1)


def _batch() -> tuple:
    import torch

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, HIDDEN, generator=generator).bfloat16().float()
    weights = torch.rand(12, TOP_K, generator=generator)
    ids = torch.rand(12, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
    return x, ids.contiguous(), weights


def _run(family: str, experts, x, ids, weights):
    if family in ALONE:
        return None
    if not family.startswith("llama4"):
        return experts(x, ids, weights)
    every = experts(x.repeat(EXPERTS, 1)).view(EXPERTS, *x.shape)  # all tokens through all experts
    return sum(weights[:, k, None] * every[ids[:, k], range(len(x))] for k in range(TOP_K))


def _reference(family: str, model) -> dict:
    import torch

    tensors = {}
    layers = next(module for name, module in model.named_modules() if name.endswith("layers") and "vis" not in name)
    for index, layer in enumerate(layers):
        block = getattr(layer, "mlp", None) or getattr(layer, "block_sparse_moe", None) or layer.feed_forward
        experts = block if hasattr(block, "input_linear") else getattr(block, "experts", None)
        if experts is None:
            continue
        for name, matrices in zip(("gate", "up", "down"), _matrices(experts), strict=True):
            tensors[f"{index}.{name}"] = matrices.detach().float().contiguous()
        if family in BIASED:
            biases = (*_halves(experts, experts.gate_up_proj_bias), experts.down_proj_bias)
            for name, bias in zip(("gate", "up", "down"), biases, strict=True):
                tensors[f"{index}.{name}_bias"] = bias.detach().float().clone()
        x, ids, weights = _batch()
        tensors |= {f"{index}.x": x, f"{index}.ids": ids, f"{index}.weights": weights}
        block.float()
        with torch.no_grad():
            if (output := _run(family, experts, x, ids, weights)) is not None:
                tensors[f"{index}.experts"] = output.contiguous()
            if family in BLOCKS:
                router = block.gate if hasattr(block, "gate") else block.router
                tensors[f"{index}.router"] = router.weight.clone()
                tensors[f"{index}.block"] = block(x[None])[0].contiguous()
    return tensors


def main(folder: Path) -> None:
    import safetensors.torch

    for family, arguments in FAMILIES.items():
        model = _make(family, arguments)
        for name, as_on_hub in (("hub", True), ("memory", False)):
            model.save_pretrained(folder / family / name, save_original_format=as_on_hub)
        if family == "gpt_oss":
            _save_mxfp4(folder / family / "hub", folder / family / "mxfp4")
        safetensors.torch.save_file(_reference(family, model), folder / family / "reference.safetensors")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(Path(sys.argv[1]))
