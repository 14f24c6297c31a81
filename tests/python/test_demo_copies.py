"""The demo model in other encodings: a small model of its kind, written and read back."""

import json

import numpy as np
import pytest
from gguf_cases import dequantise, gguf

from kt_kernel.demo import checkpoint, copies
from kt_kernel.demo.tensors import PROJECTIONS, DemoTensors
from kt_kernel.weights.checkpoint import CheckpointExperts
from kt_kernel.weights.floats import round_finite, to_f32
from kt_kernel.weights.tensor_files import TensorFiles
from kt_kernel.weights.tensor_writer import TensorSpec, TensorWriter

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "vocab_size": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER = {
    "model": {"vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
    "added_tokens": [{"id": 0}],
}


def shapes() -> dict[str, tuple[int, ...]]:
    hidden, neurons = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    made = {"model.embed_tokens.weight": (4, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        base = f"model.layers.{layer}"
        made[f"{base}.input_layernorm.weight"] = made[f"{base}.post_attention_layernorm.weight"] = (hidden,)
        made |= {f"{base}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        made |= {f"{base}.self_attn.{name}_proj.weight": (64, hidden) for name in "kv"}
        made[f"{base}.block_sparse_moe.gate.weight"] = (3, hidden)
        for expert in range(3):
            stem = f"{base}.block_sparse_moe.experts.{expert}"
            made[f"{stem}.w1.weight"] = made[f"{stem}.w3.weight"] = (neurons, hidden)
            made[f"{stem}.w2.weight"] = (hidden, neurons)
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(0)
    specs = {name: TensorSpec("BF16", shape) for name, shape in shapes().items()}
    path = folder / checkpoint.WEIGHTS
    with TensorWriter(path, specs, {"format": "pt"}, "a model", "*.tmp") as writer:
        for name, spec in specs.items():
            writer.write(name, round_finite(rng.standard_normal(spec.shape).astype(np.float32)))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


def test_pairs_of_heads_go_both_ways():
    matrix = np.arange(8 * 3).reshape(8, 3)
    neighbours = copies._neighbours(matrix, 2)
    assert neighbours[:, 0].tolist() == [0, 6, 3, 9, 12, 18, 15, 21]
    assert np.array_equal(checkpoint.halves(neighbours, 2), matrix)


@pytest.mark.parametrize(("kind", "error"), [("bf16", 0.0), ("q8_0", 0.01), ("q4_0", 0.15)])
def test_gguf_has_the_weights(model, tmp_path, kind, error):
    reader = gguf.GGUFReader(copies.write_gguf(model, tmp_path / "model.gguf", kind))
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == 2 + 2 * 10
    with DemoTensors(model) as tensors:
        for layer in range(2):
            for projection in PROJECTIONS:
                tensor = found[f"blk.{layer}.ffn_{projection}_exps.weight"]
                assert tensor.tensor_type.name.lower() == kind
                exact = tensors.experts(layer, projection)
                got = dequantise(tensor.data, kind).reshape(exact.shape)
                assert np.abs(got - exact).mean() <= error * np.abs(exact).mean()
            router = found[f"blk.{layer}.ffn_gate_inp.weight"]
            assert np.array_equal(router.data, tensors.tensor(f"model.layers.{layer}.block_sparse_moe.gate.weight"))
    assert reader.fields["llama.expert_used_count"].contents() == 2
    assert reader.fields["tokenizer.ggml.merges"].contents() == ["a b"]


def test_experts_alone(model, tmp_path):
    reader = gguf.GGUFReader(copies.write_gguf(model, tmp_path / "experts.gguf", "q8_0", experts_only=True))
    assert {tensor.name.split(".")[2] for tensor in reader.tensors} == {f"ffn_{p}_exps" for p in PROJECTIONS}


def test_fp8_experts_are_read_back(model, tmp_path):
    copies.write_fp8(model, tmp_path)
    with DemoTensors(model) as tensors, CheckpointExperts(TensorFiles(tmp_path), 1) as experts:
        for expert in range(3):
            for projection, got in zip(PROJECTIONS, experts.matrices(expert), strict=True):
                exact = tensors.experts(1, projection)[expert]
                assert 0 < np.abs(to_f32(np.asarray(got)) - exact).mean() < 0.04 * np.abs(exact).mean()
