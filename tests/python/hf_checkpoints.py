"""A toy Mixture-of-Experts model as a checkpoint: as it is, or with its linears quantised as others do it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from encoded_weights import Encoded, nearest_bf16
from hf_models import VOCABULARY, randomise
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from weight_files import write_safetensors

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def make_toy(model_type: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16, **fields):
    """Its first layer is dense, so that there are linears of every kind."""
    given = SIZES | ({"mlp_only_layers": [0]} if model_type == "qwen3_moe" else {}) | fields
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **given))
    return randomise(model).to(dtype)


def save_toy(folder: Path, **options) -> Path:
    make_toy(**options).save_pretrained(folder)
    return folder


_PLAIN = ("embed", "lm_head", "norm", "mlp.gate.")


def encode_checkpoint(
    source: Path, target: Path, encode: Callable[..., Encoded], quantization_config: dict
) -> tuple[Path, Path]:
    """Two folders below `target`: linears of `source` replaced by random ones in an encoding, and by what these mean in
    bf16. Embeddings, norms and routers stay.
    """
    rng = np.random.default_rng(0)
    tensors, dtypes, meaning = {}, {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if any(part in name for part in _PLAIN):
            tensors[name], dtypes[name] = tensor.view(torch.int16).numpy().view(np.uint16), "BF16"
            meaning[name] = tensor
            continue
        parts, exact = encode(rng, *tensor.shape)
        meaning[name] = torch.from_numpy(nearest_bf16(exact)).bfloat16().contiguous()
        for suffix, (dtype, array) in parts.items():
            key = f"{name.removesuffix('.weight')}.{suffix}"
            tensors[key], dtypes[key] = array, dtype
    encoded, plain = target / "encoded", target / "plain"
    for folder in (encoded, plain):
        folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    save_file(meaning, plain / "model.safetensors", metadata={"format": "pt"})
    (encoded / "config.json").write_text(json.dumps({**config, "quantization_config": quantization_config}))
    write_safetensors(encoded / "model.safetensors", tensors, {"format": "pt"}, None, dtypes)
    return encoded, plain
