"""The files of the model: a Mixtral checkpoint as the hub has them."""

import json
from pathlib import Path

import numpy as np

from kt_kernel.demo import experts
from kt_kernel.demo.source import read_tensor
from kt_kernel.demo.tensors import PROJECTIONS
from kt_kernel.demo.tokenizer import write_tokenizer
from kt_kernel.weights.floats import round_finite
from kt_kernel.weights.gguf_file import read_field
from kt_kernel.weights.gguf_files import GgufFiles
from kt_kernel.weights.progress import Progress
from kt_kernel.weights.tensor_writer import TensorSpec, TensorWriter

WEIGHTS = "model.safetensors"


def write_checkpoint(source: Path, folder: Path) -> None:
    """Everything that from_pretrained needs. The folder is there, and empty."""
    with GgufFiles(source) as files:
        config = model_config(files)
        for name, content in (("config.json", config), ("generation_config.json", _generation_config(config))):
            (folder / name).write_text(json.dumps(content, indent=1) + "\n")
        write_tokenizer(source, folder, config["max_position_embeddings"])
        with TensorWriter(
            folder / WEIGHTS, _tensors(config), {"format": "pt"}, "the demo model", f"{WEIGHTS}.tmp"
        ) as writer:
            _write_tensors(files, config, writer)


def model_config(files: GgufFiles) -> dict:
    heads = files.field("attention.head_count")
    special = {name: read_field(files.path, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # what versions of transformers before 5 read
        "vocab_size": files.entry("token_embd.weight").shape[0],
        "hidden_size": files.field("embedding_length"),
        "intermediate_size": files.field("feed_forward_length") // experts.SLICES,
        "num_hidden_layers": files.field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": files.field("attention.head_count_kv"),
        "head_dim": files.field("embedding_length") // heads,
        "num_local_experts": experts.EXPERTS,
        "num_experts_per_tok": experts.SLICES,
        "hidden_act": "silu",
        "max_position_embeddings": files.field("context_length"),
        "rms_norm_eps": round(files.field("attention.layer_norm_rms_epsilon"), 12),  # an f32 in the file
        "rope_theta": files.field("rope.freq_base"),
        "sliding_window": None,
        "attention_dropout": 0.0,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": special["bos"],
        "eos_token_id": special["eos"],
        "pad_token_id": special["padding"],
    }


def _generation_config(config: dict) -> dict:
    """With the sampling that the authors of SmolLM2 recommend for it."""
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**special, "do_sample": True, "temperature": 0.2, "top_p": 0.9}


def _tensors(config: dict) -> dict[str, TensorSpec]:
    hidden, neurons, depth = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * depth, config["num_key_value_heads"] * depth
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer_idx in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer_idx}"
        shapes[f"{base}.input_layernorm.weight"] = shapes[f"{base}.post_attention_layernorm.weight"] = (hidden,)
        attention = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        shapes |= {f"{base}.self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
        shapes[f"{base}.block_sparse_moe.gate.weight"] = (experts.EXPERTS, hidden)
        for expert in range(experts.EXPERTS):
            for projection, name in PROJECTIONS.items():
                shape = (hidden, neurons) if projection == "down" else (neurons, hidden)
                shapes[f"{base}.block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (hidden,)
    return {name: TensorSpec("BF16", shape) for name, shape in shapes.items()}


def _write_tensors(files: GgufFiles, config: dict, writer: TensorWriter) -> None:
    def write(name: str, values: np.ndarray) -> None:
        writer.write(name, round_finite(np.array(values, np.float32, order="C")))

    layers = config["num_hidden_layers"]
    with Progress("demo model", layers + 1) as bar:
        write("model.embed_tokens.weight", read_tensor(files, "token_embd.weight"))
        write("model.norm.weight", read_tensor(files, "output_norm.weight"))
        bar.advance()
        for layer_idx in range(layers):
            base, block = f"model.layers.{layer_idx}", f"blk.{layer_idx}"
            _write_attention(files, config, base, block, write)
            layer = experts.Layer(
                *(read_tensor(files, f"{block}.ffn_{name}.weight") for name in ("gate", "up", "down", "norm"))
            )
            write(f"{base}.post_attention_layernorm.weight", layer.norm)
            write(f"{base}.block_sparse_moe.gate.weight", experts.router(layer, layer_idx))
            for expert, matrices in experts.experts(layer, layer_idx):
                for projection, name in PROJECTIONS.items():
                    write(f"{base}.block_sparse_moe.experts.{expert}.{name}.weight", getattr(matrices, projection))
            bar.advance()


def _write_attention(files: GgufFiles, config: dict, base: str, block: str, write) -> None:
    write(f"{base}.input_layernorm.weight", read_tensor(files, f"{block}.attn_norm.weight"))
    for name, source, heads in (
        ("q", "q", config["num_attention_heads"]),
        ("k", "k", config["num_key_value_heads"]),
        ("v", "v", None),
        ("o", "output", None),
    ):
        matrix = read_tensor(files, f"{block}.attn_{source}.weight")
        write(f"{base}.self_attn.{name}_proj.weight", matrix if heads is None else halves(matrix, heads))


def halves(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads whose rotated pairs are neighbours, as GGUF files have them, with pairs half a head apart."""
    pairs = matrix.reshape(heads, -1, 2, matrix.shape[1])
    return pairs.swapaxes(1, 2).reshape(matrix.shape)
