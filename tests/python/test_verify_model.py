"""``kt verify MODEL``: a layer against torch, and a whole model against itself in bf16."""

import json

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: kt verify MODEL was not tested")

import torch
from encoded_weights import fp8_block
from engine_cases import VOCABULARY, tiny_tokenizer
from gguf_cases import Experts, write_gguf
from hf_checkpoints import SIZES, encode_checkpoint, make_toy, save_toy
from layer_reference import Shape

from kt_kernel.bench.quality import Nobody
from kt_kernel.convert import Settings, convert
from kt_kernel.verify import model_layer, whole_model
from kt_kernel.verify.model_layer import check_layer, torch_moe
from kt_kernel.verify.reference import Activation, moe
from kt_kernel.verify.whole_model import NotMeasuredError, compare

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Its first layer is dense."""
    folder = save_toy(tmp_path_factory.mktemp("toy"), vocab_size=VOCABULARY)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fp8(toy, tmp_path_factory):
    """The same with random weights in e4m3."""
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = encode_checkpoint(toy, tmp_path_factory.mktemp("fp8"), fp8_block, config)[0]
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", ["auto", "BF16", "AMXINT8", "AMXINT4", "INT4G"])
def test_a_layer_is_right(toy, method):
    found = check_layer(toy, None, method, threads=1)
    assert found["failures"] == []
    assert found["layer"] == 1
    assert found["method"] == ("BF16" if method == "auto" else method)
    assert found["experts"] == [*range(8)]
    assert found["source"] == "the checkpoint's weights"
    assert 0 < found["relative_error"] < found["limit"]


def test_a_layer_that_keeps_codes(fp8):
    found = check_layer(fp8, threads=1)
    assert (found["method"], found["format"], found["failures"]) == ("FP8", "fp8", [])
    assert found["relative_error"] < 0.006


@pytest.mark.parametrize("method", ["auto", "INT4G"])
def test_a_layer_with_biases_and_another_activation(method, tmp_path):
    model = make_toy("gpt_oss", num_local_experts=8, moe_intermediate_size=SIZES["intermediate_size"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name and name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(tmp_path)
    found = check_layer(tmp_path, threads=1, method=method)
    assert found["failures"] == []
    assert found["relative_error"] > 0


def test_a_layer_of_gguf(tmp_path):
    shape = Shape(4, 2, 256, 512)
    fields = {
        "qwen3moe.block_count": 4,
        "qwen3moe.expert_count": 4,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.embedding_length": 256,
        "qwen3moe.expert_feed_forward_length": 512,
    }
    path = write_gguf(tmp_path / "model.gguf", Experts(shape, ("q4_k", "q4_k", "q6_k")).tensors(), fields=fields)
    found = check_layer(path, threads=1)
    assert (found["method"], found["source"], found["failures"]) == ("LLAMAFILE", "the package gguf", [])
    with pytest.raises(NotMeasuredError, match="GGUF files hold no model"):
        compare(path, "auto", 64)


def test_weights_that_are_not_those_of_the_checkpoint_are_found(toy, monkeypatch):
    """The control: one expert of eight has a scale of 1.2."""
    right = model_layer._originals

    def wrong(experts, chosen):
        found = right(experts, chosen)
        found.experts[3] = tuple(np.float32(1.2) * matrix for matrix in found.experts[3])
        return found

    monkeypatch.setattr(model_layer, "_originals", wrong)
    assert "off the checkpoint's weights by torch; the limit is" in check_layer(toy, threads=1)["failures"][0]


def test_a_layer_without_experts_is_refused(toy):
    with pytest.raises(ValueError, match=r"layer 0 of .* has no experts; layers that do are 1 to 1"):
        check_layer(toy, 0)


def test_large_layers_are_sampled():
    assert model_layer._sample(256, 7168, 2048) == [0, 128, 255]
    assert model_layer._sample(128, 2048, 768) == [0, 18, 36, 54, 73, 91, 109, 127]
    assert model_layer._sample(4, 64, 64) == [0, 1, 2, 3]
    assert model_layer._sample(8, 1 << 14, 1 << 14) == [0]


@pytest.mark.parametrize(
    "activation",
    [
        Activation(),
        Activation(0.5),
        Activation(7.0, 1.702, "swigluoai"),
        Activation(0.5, 1.1),
        Activation(0, 0, "gelu_tanh"),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_biases", [False, True])
def test_torch_computes_what_the_reference_does(activation, with_biases):
    rng = np.random.default_rng(0)
    experts = {2: tuple(rng.standard_normal(size, np.float32) for size in ((24, 16), (24, 16), (16, 24)))}
    biases = {2: tuple(rng.standard_normal(size, np.float32) for size in (24, 24, 16))} if with_biases else None
    x, ids = rng.standard_normal((5, 16), np.float32), np.array([[2, -1]] * 5)
    weights = rng.random((5, 2), np.float32)
    found = torch_moe(experts, torch.from_numpy(x), ids, weights, activation, biases).numpy()
    np.testing.assert_allclose(found, moe(experts, x, ids, weights, activation, biases), rtol=1e-4, atol=1e-4)


class TestWholeModel:
    def test_bf16_beside_transformers(self, toy):
        found = compare(toy, "auto", 96, threads=1)
        assert (found["format"], found["reference"], found["dtype"]) == ("bf16", "transformers", "float32")
        assert found["failures"] == []
        assert found["tokens"] == 95
        assert 0 < found["divergence"] < 0.01
        assert found["perplexity"] == pytest.approx(found["reference_perplexity"], rel=0.05)

    def test_fewer_bits_are_farther_off(self, toy):
        near, far = (compare(toy, method, 96, threads=1)["divergence"] for method in ("AMXINT8", "AMXINT4"))
        assert far > 3 * near > 0

    def test_codes_of_a_checkpoint_beside_bf16(self, fp8):
        found = compare(fp8, "auto", 64, threads=1)
        assert (found["format"], found["reference"]) == ("fp8", "BF16")
        assert found["divergence"] < 0.05

    def test_what_is_too_far_off_is_found(self, toy, monkeypatch):
        monkeypatch.setattr(whole_model, "divergence_limit", lambda weight_format: 1e-9)
        (failure,) = compare(toy, "AMXINT8", 32, threads=1)["failures"]
        assert failure.endswith("from bf16; the limit of int8 is 1e-09")

    def test_a_model_that_does_not_fit_is_not_measured(self, toy, monkeypatch):
        monkeypatch.setattr(whole_model, "available_bytes", lambda: 10**9)
        with pytest.raises(NotMeasuredError, match=r"in bf16 the model needs 1\.1 GB of memory, 1\.0 GB are free"):
            compare(toy, "BF16", 32)

    def test_memory_decides_the_type(self, toy, monkeypatch):
        sizes = [whole_model.needed_bytes(toy, size, size) for size in (2, 4)]
        monkeypatch.setattr(whole_model, "available_bytes", lambda: sum(sizes) // 2)
        assert whole_model._dtype(toy, plain=True) == "bfloat16"
        experts = 8 * 3 * SIZES["hidden_size"] * SIZES["moe_intermediate_size"]
        assert whole_model.needed_bytes(toy, 2, 0) - whole_model.needed_bytes(toy, 0, 0) == 2 * experts

    def test_converted_weights_are_no_model_but_their_layers_are_checked(self, toy, tmp_path):
        convert(Settings(toy, tmp_path / "int8", "int8"), Nobody())
        with pytest.raises(NotMeasuredError, match="name the model that they were made of"):
            compare(tmp_path / "int8", "auto", 32)
        found = check_layer(tmp_path / "int8", threads=1)
        assert (found["method"], found["relative_error"], found["failures"]) == ("AMXINT8", None, [])
        assert 0 < found["limit_share"] < 1

    def test_a_model_that_transformers_does_not_know(self, toy, tmp_path):
        for file in toy.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((toy / "config.json").read_text()) | {"model_type": "nobody", "architectures": ["Nobody"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(NotMeasuredError, match=r"^(transformers does not load it|no tokenizer): .*nobody"):
            compare(tmp_path, "auto", 32)

    def test_no_tokenizer(self, toy, tmp_path):
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).symlink_to(toy / name)
        with pytest.raises(NotMeasuredError, match="no tokenizer: "):
            compare(tmp_path, "auto", 32)
