"""Checkpoints without weights: a config, the demo model's tokenizer, and files whose tensors are holes.

A hole reads as zeros and takes no room on the disk. Experts are filled with random weights once they are in memory, so
a model of 60 GB needs neither that much disk nor a download.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from kt_kernel.weights.tensor_writer import TensorSpec, layout


@dataclass(frozen=True)
class Qwen3Moe:
    """Sizes of a model of the family."""

    layers: int
    hidden: int
    experts: int
    top_k: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def expert_weights(self) -> int:
        """Of a layer."""
        return 3 * self.experts * self.hidden * self.intermediate

    @property
    def other_weights(self) -> int:
        """Of a layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads) + self.experts * self.hidden

    def config(self) -> dict:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }

    def layer_shapes(self, layer_idx: int) -> dict[str, tuple[int, ...]]:
        base, q, kv = f"model.layers.{layer_idx}", self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            f"{base}.input_layernorm.weight": (self.hidden,),
            f"{base}.post_attention_layernorm.weight": (self.hidden,),
            f"{base}.self_attn.q_proj.weight": (q, self.hidden),
            f"{base}.self_attn.k_proj.weight": (kv, self.hidden),
            f"{base}.self_attn.v_proj.weight": (kv, self.hidden),
            f"{base}.self_attn.o_proj.weight": (self.hidden, q),
            f"{base}.self_attn.q_norm.weight": (self.head_dim,),
            f"{base}.self_attn.k_norm.weight": (self.head_dim,),
            f"{base}.mlp.gate.weight": (self.experts, self.hidden),
        }
        for expert in range(self.experts):
            stem = f"{base}.mlp.experts.{expert}"
            shapes[f"{stem}.gate_proj.weight"] = shapes[f"{stem}.up_proj.weight"] = (self.intermediate, self.hidden)
            shapes[f"{stem}.down_proj.weight"] = (self.hidden, self.intermediate)
        return shapes


@dataclass(frozen=True)
class DeepseekV2:
    """Sizes of a model of the family without latents of queries; the first layer has no experts."""

    layers: int
    hidden: int
    experts: int
    top_k: int
    intermediate: int
    shared: int  # experts that every token goes to
    dense: int  # intermediate size of the first layer
    heads: int
    latent: int
    nope: int
    rotary: int
    value: int
    vocabulary: int

    @property
    def expert_weights(self) -> int:
        """Of a layer."""
        return 3 * self.experts * self.hidden * self.intermediate

    @property
    def other_weights(self) -> int:
        """Of a layer."""
        return sum(rows * columns for rows, columns in self._matrices().values())

    def _matrices(self) -> dict[str, tuple[int, int]]:
        """Of a layer with experts, without them."""
        shared = self.shared * self.intermediate
        return {
            "self_attn.q_proj": (self.heads * (self.nope + self.rotary), self.hidden),
            "self_attn.kv_a_proj_with_mqa": (self.latent + self.rotary, self.hidden),
            "self_attn.kv_b_proj": (self.heads * (self.nope + self.value), self.latent),
            "self_attn.o_proj": (self.hidden, self.heads * self.value),
            "mlp.gate": (self.experts, self.hidden),
            "mlp.shared_experts.gate_proj": (shared, self.hidden),
            "mlp.shared_experts.up_proj": (shared, self.hidden),
            "mlp.shared_experts.down_proj": (self.hidden, shared),
        }

    def config(self) -> dict:
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense,
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.latent,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rotary,
            "v_head_dim": self.value,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared,
            "num_experts_per_tok": self.top_k,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }

    def layer_shapes(self, layer_idx: int) -> dict[str, tuple[int, ...]]:
        base = f"model.layers.{layer_idx}"
        shapes: dict[str, tuple[int, ...]] = {
            f"{base}.input_layernorm.weight": (self.hidden,),
            f"{base}.post_attention_layernorm.weight": (self.hidden,),
            f"{base}.self_attn.kv_a_layernorm.weight": (self.latent,),
        }
        experts = layer_idx > 0
        matrices = {f"{base}.{name}.weight": shape for name, shape in self._matrices().items()}
        shapes |= {name: shape for name, shape in matrices.items() if experts or ".mlp." not in name}
        stems = [f"experts.{expert}." for expert in range(self.experts)] if experts else [""]
        rows = self.intermediate if experts else self.dense
        for stem in stems:
            shapes[f"{base}.mlp.{stem}gate_proj.weight"] = shapes[f"{base}.mlp.{stem}up_proj.weight"] = (
                rows,
                self.hidden,
            )
            shapes[f"{base}.mlp.{stem}down_proj.weight"] = (self.hidden, rows)
        return shapes


# Qwen3-30B-A3B, and one of as many layers whose kernels have next to nothing to do.
QWEN3_30B = Qwen3Moe(48, 2048, 128, 8, 768, 32, 4, 128, 151936)
TINY_48 = Qwen3Moe(48, 64, 8, 2, 64, 4, 2, 16, 1024)
DEEPSEEK_V2_LITE = DeepseekV2(27, 2048, 64, 6, 1408, 2, 10944, 16, 512, 128, 64, 128, 102400)


def write_checkpoint(model: Qwen3Moe | DeepseekV2, folder: Path, demo: Path) -> Path:
    """`demo`: whose tokenizer it gets."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config()))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(demo / name, folder / name)
    others = {"model.norm.weight": (model.hidden,)}
    others["model.embed_tokens.weight"] = others["lm_head.weight"] = (model.vocabulary, model.hidden)
    files = {"model-others.safetensors": others}
    files |= {f"model-{i:05d}.safetensors": model.layer_shapes(i) for i in range(model.layers)}
    for name, shapes in files.items():
        _write_holes(folder / name, shapes)
    weight_map = {tensor: name for name, shapes in files.items() for tensor in shapes}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _write_holes(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    made = layout({name: TensorSpec("BF16", shape) for name, shape in shapes.items()}, {"format": "pt"})
    with path.open("wb") as file:
        file.write(made.head)
        file.truncate(made.bytes)
