"""Checkpoints that are quantised already: experts keep their codes, everything else is decoded while it loads."""

import json
from functools import partial

import encoded_weights
import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: its plugin was not tested")

import family_models
import torch
from hf_checkpoints import encode_checkpoint, make_toy, save_toy
from hf_models import eager_logits, error, logits
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kt_kernel.hf import KTConfig, sources

SMALL = {"threads": 2, "subpools": 1}
CONFIG = KTConfig(**SMALL)
LIMIT = 0.02  # experts compute in bf16

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
_COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}}
# name -> how matrices are encoded, what config.json says, the method that keeps the experts
ENCODINGS = {
    "fp8": (
        partial(encoded_weights.fp8_block, block=(32, 32)),
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        "FP8",
    ),
    "fp8 per channel": (
        partial(encoded_weights.fp8_channel, ndim=2),
        {**_COMPRESSED, "format": "float-quantized"},
        "FP8_PERCHANNEL",
    ),
    "compressed int4": (encoded_weights.rawint4, {**_COMPRESSED, "format": "pack-quantized"}, "RAWINT4"),
    "gptq": (encoded_weights.gptq, _GPTQ, "GPTQ_INT4"),
    "gptq with act-order": (partial(encoded_weights.gptq, order="shared"), {**_GPTQ, "desc_act": True}, "GPTQ_INT4"),
    "gptq version 2": (
        partial(encoded_weights.gptq, zeros="version 2"),
        {**_GPTQ, "checkpoint_format": "gptq_v2"},
        "GPTQ_INT4",
    ),
    "awq": (encoded_weights.awq, {"quant_method": "awq", "bits": 4, "group_size": 32}, "AWQ"),
    "nvfp4": (encoded_weights.nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    "mxfp8": (encoded_weights.mxfp8, {"quant_method": "mxfp8"}, "MXFP8"),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module", params=ENCODINGS)
def case(request, toy, tmp_path_factory):
    encode, config, method = ENCODINGS[request.param]
    folder = tmp_path_factory.mktemp("encoded")
    encoded, plain = encode_checkpoint(toy, folder, encode, config)
    expected = eager_logits(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
    return encoded, plain, method, expected


def layers_of(model) -> list:
    return [module.kt_layer for module in model.modules() if hasattr(module, "kt_layer")]


def test_experts_keep_their_codes_and_the_rest_is_decoded(case, caplog):
    encoded, plain, method, expected = case
    model = AutoModelForCausalLM.from_pretrained(encoded, quantization_config=CONFIG, dtype=torch.float32)
    assert "UNEXPECTED" not in caplog.text
    assert "MISSING" not in caplog.text
    assert [layer.wrapper.method for layer in layers_of(model)] == [method]
    assert error(logits(model), expected) < LIMIT
    twin = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict()
    state = model.state_dict()
    assert state.keys() == {name for name in twin if ".experts." not in name}
    assert all(torch.equal(tensor, twin[name]) for name, tensor in state.items())


def test_a_method_that_decodes(case):
    encoded, _, _, expected = case
    config = KTConfig("BF16", **SMALL)
    model = AutoModelForCausalLM.from_pretrained(encoded, quantization_config=config, dtype=torch.float32)
    assert [layer.wrapper.method for layer in layers_of(model)] == ["BF16"]
    assert error(logits(model), expected) < LIMIT


def test_without_our_loader_they_are_decoded_and_packed(case, monkeypatch):
    encoded, _, _, expected = case
    monkeypatch.setattr(sources, "_objection", lambda *_: "a test says so")
    model = AutoModelForCausalLM.from_pretrained(encoded, quantization_config=CONFIG, dtype=torch.float32)
    assert [choice.way.value for choice in model.hf_quantizer.choices.values()] == ["tensors"]
    assert not any(".experts." in name for name in model.state_dict())
    assert error(logits(model), expected) < LIMIT


def test_missing_experts_are_not_made_up(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_objection", lambda *_: "a test says so")
    encoded, _ = encode_checkpoint(toy, tmp_path, *ENCODINGS["fp8"][:2])
    tensors = load_file(encoded / "model.safetensors")
    there = {name: tensor for name, tensor in tensors.items() if not ("experts" in name and "down_proj" in name)}
    save_file(there, encoded / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no weights for model\.layers\.1\.mlp\.experts\.down_proj; is the"):
        AutoModelForCausalLM.from_pretrained(encoded, quantization_config=CONFIG)


def test_the_files_of_gpt_oss(tmp_path):
    model = make_toy("gpt_oss", num_local_experts=8, moe_intermediate_size=None, intermediate_size=96)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(family_models.MXFP4):
                parameter.copy_(family_models._to_mxfp4(parameter)[2])
    model.save_pretrained(tmp_path / "plain")
    family_models._save_mxfp4(tmp_path / "plain", tmp_path / "mxfp4")
    config = json.loads((tmp_path / "plain/config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "mxfp4/config.json").write_text(json.dumps(config))
    expected = eager_logits(model.float())
    for method, kept in (("auto", "MXFP4"), ("AMXINT8", "AMXINT8")):
        settings = KTConfig(method, **SMALL)
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "mxfp4", quantization_config=settings, dtype=torch.float32
        )
        assert [layer.wrapper.method for layer in layers_of(loaded)] == [kept] * 2
        assert error(logits(loaded), expected) < (LIMIT if kept == "MXFP4" else 0.05)


def test_other_configs_are_still_refused(toy, tmp_path):
    from transformers import BitsAndBytesConfig

    encoded, _ = encode_checkpoint(toy, tmp_path, *ENCODINGS["fp8"][:2])
    with pytest.raises(ValueError, match="quantized with FineGrainedFP8Config"):
        AutoModelForCausalLM.from_pretrained(encoded, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"weight": "U8", "weight.absmax": "F32", "weight.quant_map": "F32"}, "down_proj.weight"),  # bitsandbytes
        ({"codes": "I8", "codebooks": "F16", "scales_": "F16"}, "down_proj.codes"),  # AQLM
        ({"weight": "F8_E4M3"}, "down_proj.weight"),
    ],
)
def test_an_unknown_encoding_is_refused(tensors, named, toy, tmp_path):
    def unknown(_, n, k):
        arrays = {"U8": np.zeros((n * k // 2, 1), np.uint8), "I8": np.zeros((n, k), np.int8)}
        arrays |= {"F32": np.zeros(n, np.float32), "F16": np.zeros(n, np.float16)}
        arrays["F8_E4M3"] = np.zeros((n, k), np.uint8)
        return {suffix: (dtype, arrays[dtype]) for suffix, dtype in tensors.items()}, np.zeros((n, k))

    encoded, plain = encode_checkpoint(toy, tmp_path, unknown, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ValueError, match=rf"{named}.*no known encoding; known are NVFP4"):
        AutoModelForCausalLM.from_pretrained(encoded, quantization_config=CONFIG)
    with pytest.raises(ValueError, match=rf"{named}.*no known encoding"):  # the experts are known, from elsewhere
        AutoModelForCausalLM.from_pretrained(encoded, quantization_config=KTConfig(**SMALL, weight_path=plain))


def test_layers_that_were_left_out_stay_as_they_are(toy, tmp_path):
    encoded, plain = encode_checkpoint(toy, tmp_path, *ENCODINGS["fp8"][:2])
    tensors, known = load_file(encoded / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.0.self_attn") and "proj" in name]:
        del tensors[name]
        if name.endswith(".weight"):
            tensors[name] = known[name]
    save_file(tensors, encoded / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(encoded, quantization_config=CONFIG, dtype=torch.float32)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in known.items() if ".experts." not in name)


def test_a_damaged_matrix_is_named(toy, tmp_path):
    def with_nan(rng, n, k):
        parts, meaning = encoded_weights.fp8_block(rng, n, k, block=(32, 32))
        if (n, k) == (256, 128):  # gates of the dense layer
            parts["weight"][1][3, 4] = 0x7F
        return parts, meaning

    encoded, _ = encode_checkpoint(toy, tmp_path, with_nan, {"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj\.weight.*NaN"):
        AutoModelForCausalLM.from_pretrained(encoded, quantization_config=CONFIG)
