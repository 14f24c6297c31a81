"""How families spell their experts on the hub, where transformers does not write it that way any more."""

import numpy as np
import pytest
from layer_reference import Shape
from weight_files import as_loaded, decoded, make_layer, originals, same, write_safetensors

from kt_kernel.weights import find_method, load_layer, save_layer

SHAPE = Shape(experts=3, top_k=2, hidden=72, intermediate=130)

# Layer 7. Names of gate, up and down; two names where gate and up are in one tensor. {} is the expert.
EACH = {
    "Mixtral by llmcompressor": [
        "model.layers.7.block_sparse_moe.experts.{}.gate_proj.weight",
        ".up_proj.",
        ".down_proj.",
    ],
    "Mixtral": ["model.layers.7.block_sparse_moe.experts.{}.w1.weight", ".w3.", ".w2."],
    "Jamba": ["model.layers.7.feed_forward.experts.{}.gate_proj.weight", ".up_proj.", ".down_proj."],
    "LFM2": ["model.layers.7.feed_forward.experts.{}.w1.weight", ".w3.", ".w2."],
    "Mistral": ["layers.7.experts.{}.w1.weight", ".w3.", ".w2."],
    "DeepSeek V4": ["layers.7.ffn.experts.{}.w1.weight", ".w3.", ".w2."],
    "Kimi K2.5": ["language_model.model.layers.7.mlp.experts.{}.gate_proj.weight", ".up_proj.", ".down_proj."],
    "GLM-4.5V": ["model.language_model.layers.7.mlp.experts.{}.gate_proj.weight", ".up_proj.", ".down_proj."],
    "Qwen3-Omni": ["thinker.model.layers.7.mlp.experts.{}.gate_proj.weight", ".up_proj.", ".down_proj."],
    "DeepSeek-VL2": ["language.model.layers.7.mlp.experts.{}.gate_proj.weight", ".up_proj.", ".down_proj."],
    "MiniMax-M3": ["language_model.model.layers.7.block_sparse_moe.experts.{}.w1.weight", ".w3.", ".w2."],
}
JOINED = {
    "Qwen3.5": ["model.language_model.layers.7.mlp.experts.gate_up_proj", "down_proj"],
    "Granite": ["model.layers.7.block_sparse_moe.input_linear.weight", "output_linear.weight"],
    "Gemma 4": ["model.language_model.layers.7.experts.gate_up_proj", "down_proj"],
    "JetMoE": ["model.layers.7.mlp.input_linear.weight", "output_linear.weight"],
}
TURNED = {
    "Llama 4": ["language_model.model.layers.7.feed_forward.experts.gate_up_proj", "down_proj"],
    "Qwen3-VL": ["model.language_model.layers.7.mlp.experts.gate_up_proj", "down_proj"],
}
STACKED = {"Step 3": [f"model.layers.7.moe.{projection}_proj.weight" for projection in ("gate", "up", "down")]}
FAMILIES = [*EACH, *JOINED, *TURNED, *STACKED]


def sibling(name: str, end: str) -> str:
    """The other name, given how it ends, or the part of it that differs."""
    if not end.startswith("."):
        return name.removesuffix("input_linear.weight").removesuffix("gate_up_proj") + end
    first = next(part for part in (".w1.", ".gate_proj.") if part in name)
    return name.replace(first, end)


def tensors_of(family: str, experts: list) -> dict[str, np.ndarray]:
    gates, ups, downs = (np.stack(matrices) for matrices in zip(*experts, strict=True))
    if family in STACKED:
        return dict(zip(STACKED[family], (gates, ups, downs), strict=True))
    if family in EACH:
        gate, *others = EACH[family]
        names = [gate, *(sibling(gate, other) for other in others)]
        return {
            name.format(expert): matrix
            for expert, matrices in enumerate(experts)
            for name, matrix in zip(names, matrices, strict=True)
        }
    both, down = (JOINED | TURNED)[family]
    packed = {both: np.concatenate([gates, ups], axis=1), sibling(both, down): downs}
    if family in TURNED:
        packed = {name: array.transpose(0, 2, 1).copy() for name, array in packed.items()}
    return packed


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_found(family, tmp_path):
    experts = originals(SHAPE)
    write_safetensors(tmp_path / "model.safetensors", tensors_of(family, experts))
    assert find_method(tmp_path, 7, SHAPE.hidden, SHAPE.intermediate) == "BF16"
    layer = make_layer(SHAPE, "bf16")
    load_layer(layer, "BF16", tmp_path, 7)
    assert same(decoded(layer), as_loaded(SHAPE, "bf16", experts))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_converted(family, tmp_path):
    experts = originals(SHAPE)
    write_safetensors(tmp_path / "model.safetensors", tensors_of(family, experts))
    layer = make_layer(SHAPE, "int4")
    save_layer(layer.pool, "AMXINT4", tmp_path, 7, tmp_path / "out")
    load_layer(layer, "AMXINT4", tmp_path / "out", 7)
    assert same(decoded(layer), as_loaded(SHAPE, "int4", experts))


@pytest.mark.parametrize(
    "bias",
    [
        "model.layers.7.mlp.experts.0.gate_proj.bias",
        "model.layers.7.block_sparse_moe.output_linear.bias",
    ],
)
def test_other_biases_are_refused(bias, tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {bias: np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match=r"experts have biases .* under the names of gpt-oss only"):
        load_layer(make_layer(SHAPE, "bf16"), "BF16", tmp_path, 7)
