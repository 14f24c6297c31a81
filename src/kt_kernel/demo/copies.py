"""The demo model in other encodings: as a GGUF file, for llama.cpp and method LLAMAFILE, and its experts in FP8."""

import json
from pathlib import Path

import numpy as np

from kt_kernel.demo.errors import DemoError
from kt_kernel.demo.tensors import PROJECTIONS, DemoTensors
from kt_kernel.weights.progress import Progress
from kt_kernel.weights.tensor_writer import TensorSpec, TensorWriter

# The types that the package gguf can write and whose blocks fit into rows of 576 and 192 weights.
GGUF_TYPES = ("bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")

# Blocks of FP8 scales: 64 divides 576 and 192, 128 does not.
FP8_BLOCK = 64
_E4M3_MAX = 448.0


def write_gguf(model: Path, target: Path, kind: str, experts_only: bool = False) -> Path:
    """A file of architecture "llama" whose matrices have the type `kind`; norms and routers stay in f32."""
    try:
        import gguf
    except ImportError:
        raise DemoError("GGUF files are written by the package gguf: pip install gguf") from None
    types = gguf.GGMLQuantizationType

    def add(name: str, values: np.ndarray, wanted: str = kind) -> None:
        data = gguf.quants.quantize(values, types[wanted.upper()])
        writer.add_tensor(name, data, raw_dtype=None if wanted in ("f32", "f16") else types[wanted.upper()])

    with DemoTensors(model) as tensors:
        config = tensors.config
        writer = gguf.GGUFWriter(target, "llama")
        _add_fields(writer, config)
        with Progress(f"GGUF {kind}", config["num_hidden_layers"]) as bar:
            for layer_idx in range(config["num_hidden_layers"]):
                block, base = f"blk.{layer_idx}", f"model.layers.{layer_idx}"
                for projection in PROJECTIONS:
                    add(f"{block}.ffn_{projection}_exps.weight", tensors.experts(layer_idx, projection))
                if not experts_only:
                    _add_attention(add, tensors, block, base)
                bar.advance()
        if not experts_only:
            add("token_embd.weight", tensors.tensor("model.embed_tokens.weight"))
            add("output_norm.weight", tensors.tensor("model.norm.weight"), "f32")
            _add_tokenizer(writer, model, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_fields(writer, config: dict) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])


def _add_attention(add, tensors: DemoTensors, block: str, base: str) -> None:
    config = tensors.config
    add(f"{block}.attn_norm.weight", tensors.tensor(f"{base}.input_layernorm.weight"), "f32")
    add(f"{block}.ffn_norm.weight", tensors.tensor(f"{base}.post_attention_layernorm.weight"), "f32")
    add(f"{block}.ffn_gate_inp.weight", tensors.tensor(f"{base}.block_sparse_moe.gate.weight"), "f32")
    for name, target, heads in (
        ("q", "q", config["num_attention_heads"]),
        ("k", "k", config["num_key_value_heads"]),
        ("v", "v", None),
        ("o", "output", None),
    ):
        matrix = tensors.tensor(f"{base}.self_attn.{name}_proj.weight")
        add(f"{block}.attn_{target}.weight", matrix if heads is None else _neighbours(matrix, heads))


def _neighbours(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads whose rotated pairs are half a head apart, with pairs as neighbours, as GGUF files have them."""
    halves = matrix.reshape(heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def _add_tokenizer(writer, model: Path, config: dict) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    control = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3 if token in control else 1 for token in range(len(words))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def write_fp8(model: Path, folder: Path) -> Path:
    """The experts alone, e4m3 with a scale for each block of 64 x 64, under their names."""
    import torch

    with DemoTensors(model) as tensors:
        layers = range(tensors.config["num_hidden_layers"])
        names = [name for layer in layers for kind in PROJECTIONS for name in tensors.expert_names(layer, kind)]
        specs: dict[str, TensorSpec] = {}
        for name in names:
            rows, depth = tensors.tensor(name).shape
            specs[name] = TensorSpec("F8_E4M3", (rows, depth))
            specs[f"{name}_scale_inv"] = TensorSpec("F32", (rows // FP8_BLOCK, depth // FP8_BLOCK))
        # All floats first, so that they are aligned.
        ordered = dict(sorted(specs.items(), key=lambda item: item[1].dtype != "F32"))
        path = folder / "experts.safetensors"
        with TensorWriter(path, ordered, {"format": "pt"}, "experts in FP8", f"{path.name}.tmp") as writer:
            for name in names:
                blocks = torch.from_numpy(tensors.tensor(name))
                blocks = blocks.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))  # [N/64, 64, K/64, 64]
                scales = blocks.abs().amax((1, 3), keepdim=True).clamp_min(2.0**-100) / _E4M3_MAX
                codes = (blocks / scales).to(torch.float8_e4m3fn).view(torch.uint8)
                writer.write(name, codes.reshape(specs[name].shape).numpy())
                writer.write(f"{name}_scale_inv", scales[:, 0, :, 0].contiguous().numpy())
    return path
