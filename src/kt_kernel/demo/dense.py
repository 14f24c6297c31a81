"""The dense original in torch, f32: what everything else is held against."""

import tempfile
from pathlib import Path

import numpy as np

from kt_kernel.demo import experts
from kt_kernel.demo.checkpoint import halves, model_config
from kt_kernel.demo.source import read_tensor, source_file
from kt_kernel.weights.gguf_files import GgufFiles

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def dense_model():
    """A LlamaForCausalLM."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as work, source_file(Path(work), lambda line: None) as source:
        config, state = _read(source)
    state = {name: torch.from_numpy(values.copy()) for name, values in state.items()}
    dense = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    dense["intermediate_size"] *= experts.SLICES
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**(dense | {"dtype": "float32", "torch_dtype": "float32"})))
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(model.config)  # its frequencies are computed, no state has them
    return model.eval()


def _read(source: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """The configuration, and the tensors under the names of Llama."""
    with GgufFiles(source) as files:
        config = model_config(files)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        state = {
            "model.embed_tokens.weight": read_tensor(files, "token_embd.weight"),
            "model.norm.weight": read_tensor(files, "output_norm.weight"),
        }
        for layer_idx in range(config["num_hidden_layers"]):
            for theirs, ours in _NAMES.items():
                matrix = read_tensor(files, f"blk.{layer_idx}.{theirs}.weight")
                matrix = halves(matrix, heads[theirs]) if theirs in heads else matrix
                state[f"model.layers.{layer_idx}.{ours}.weight"] = matrix
    return config, state
