"""Experts split between a GPU and the CPU. Here torch computes its part on the CPU too: the same split and sum."""

import logging

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: its plugin was not tested")

import torch
from hf_checkpoints import SIZES, make_toy, save_toy
from hf_models import eager_logits, error, logits
from transformers import AutoModelForCausalLM

from kt_kernel import generate_gpu_experts_masks
from kt_kernel.hf import KTConfig, sources

LIMIT = 0.01
EXPERTS = SIZES["num_experts"]


def load(folder, **options):
    config = KTConfig(threads=2, subpools=1, **options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def case(request, tmp_path_factory):
    """gpt-oss has biases, and gates and ups that alternate."""
    fields = {"num_local_experts": EXPERTS, "intermediate_size": 96} if request.param == "gpt_oss" else {}
    folder = save_toy(tmp_path_factory.mktemp("toy"), model_type=request.param, **fields)
    return folder, eager_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def modules_of(model) -> list:
    return [module for module in model.modules() if hasattr(module, "kt_layer")]


@pytest.mark.parametrize("way", ["files", "tensors"])
@pytest.mark.parametrize("count", [0, 3, EXPERTS])
def test_the_first_ones(count, way, case, monkeypatch, caplog):
    folder, expected = case
    if way == "tensors":
        monkeypatch.setattr(sources, "_objection", lambda *_: "a test says so")
    with caplog.at_level(logging.WARNING, "kt_kernel.hf"):
        model = load(folder, gpu_experts=count)
    assert ("until the model is moved to a GPU" in caplog.text) == (count > 0)
    for module in modules_of(model):
        assert module.kt_layer.wrapper.num_gpu_experts == count
        assert hasattr(module, "kt_gpu_experts") == (count > 0)
    assert error(logits(model), expected) < LIMIT


def test_each_part_alone_is_not_the_whole(case, monkeypatch):
    folder, expected = case
    model = load(folder, gpu_experts=3)
    for module in modules_of(model):
        module.kt_layer.on_gpu = None
    assert error(logits(model), expected) > 5 * LIMIT


def test_masks(case):
    folder, expected = case
    layers = len(modules_of(load(folder)))
    uses = torch.rand(layers, EXPERTS, generator=torch.Generator().manual_seed(0))
    masks = generate_gpu_experts_masks(uses, layers * EXPERTS // 2)
    model = load(folder, gpu_experts=masks)
    assert [module.kt_layer.wrapper.gpu_experts_mask.tolist() for module in modules_of(model)] == masks.tolist()
    assert error(logits(model), expected) < LIMIT
    with pytest.raises(ValueError, match=rf"gpu_experts has {layers + 1} rows.*needs \[{layers}, {EXPERTS}\]"):
        load(folder, gpu_experts=[[True] * EXPERTS] * (layers + 1))
    with pytest.raises(ValueError, match=r"gpu_experts=9 is not in 0\.\.8"):
        load(folder, gpu_experts=9)


def test_what_is_on_the_gpu_moves_with_the_model_and_is_not_saved(tmp_path):
    save_toy(tmp_path)
    model = load(tmp_path, gpu_experts=2)
    (module,) = modules_of(model)
    assert not any("kt_gpu_experts" in name for name in (*model.state_dict(), *dict(model.named_parameters())))
    model.to("meta")
    assert all(buffer.is_meta for buffer in module.kt_gpu_experts.buffers())


def test_quantised_experts_are_the_same_on_both_sides(tmp_path):
    make_toy().save_pretrained(tmp_path)
    whole, split = (logits(load(tmp_path, method="AMXINT4", gpu_experts=count)) for count in (0, 4))
    assert error(split, whole) < LIMIT
