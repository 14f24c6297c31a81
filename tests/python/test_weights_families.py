"""Checkpoints of model families: toys that transformers wrote, against what transformers computes."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import family_models
import pytest
from family_models import ALONE, BIASED, BLOCKS, EXPERTS, FAMILIES, HIDDEN, MISNAMED, SWIGLUOAI, TOP_K
from layer_reference import from_bf16, to_bf16
from wrapper_cases import torch

from kt_kernel import KTMoEWrapper
from kt_kernel.weights import ModelConfig, model_config

LIMIT = 0.01  # |error| / |result|: the roundings to bf16 are 0.004 each


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Path:
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed: checkpoints of families were not tested")
    folder = tmp_path_factory.mktemp("families")
    made = subprocess.run([sys.executable, family_models.__file__, folder], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return folder


def reference(folder: Path) -> "dict[int, dict[str, torch.Tensor]]":
    """Layer -> name -> tensor, of the layers that have experts."""
    from safetensors.torch import load_file

    layers: dict[int, dict] = {}
    for name, tensor in load_file(folder / "reference.safetensors").items():
        layer, kind = name.split(".")
        layers.setdefault(int(layer), {})[kind] = tensor
    return layers


def activation(config: ModelConfig) -> dict:
    return {
        "activation": config.activation,
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": config.swiglu_alpha,
    }


def load(path: Path, config: ModelConfig, layer: int, method: str, **options) -> KTMoEWrapper:
    wrapper = KTMoEWrapper(
        layer_idx=layer,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.moe_intermediate_size,
        cpuinfer_threads=2,
        weight_path=path,
        method=method,
        **({"threadpool_count": 1} | options),
    )
    wrapper.load_weights()
    return wrapper


def compute(x, ids, weights, gate, up, down, limit: float, alpha: float, biases=None) -> "torch.Tensor":
    """Experts in f32."""
    out = torch.zeros_like(x)
    gate_bias, up_bias, down_bias = biases or [torch.zeros(EXPERTS, 1)] * 3
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            g, u = gate[expert] @ x[token] + gate_bias[expert], up[expert] @ x[token] + up_bias[expert]
            if limit:
                g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            h = g * torch.sigmoid(alpha * g) * (u + 1) if alpha else torch.nn.functional.silu(g) * u
            out[token] += weight * (down[expert] @ h + down_bias[expert])
    return out


def error(out: "torch.Tensor", expected: "torch.Tensor") -> float:
    return float((out.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("names", ["hub", "memory"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family, names, toys):
    if family in MISNAMED and names == "hub":
        pytest.skip(f"transformers saves {family} under names that no model on the hub has")
    path, layers = toys / family / names, reference(toys / family)
    config = model_config(path)
    assert config.moe_layers == tuple(layers)
    assert (config.num_experts, config.num_experts_per_tok, config.hidden_size) == (EXPERTS, TOP_K, HIDDEN)
    for layer, known in layers.items():
        wrapper = load(path, config, layer, "auto" if names == "hub" else "BF16", **activation(config))
        assert wrapper.method == "BF16"
        matrices = [from_bf16(to_bf16(known[kind].numpy())) for kind in ("gate", "up", "down")]
        for expert in range(EXPERTS):
            for got, expected in zip(wrapper.moe.decode_expert(expert), matrices, strict=True):
                assert (got == expected[expert]).all()
        tokens = known["x"].bfloat16(), known["ids"], known["weights"]
        out = wrapper.forward(*tokens)
        biases = [known[f"{kind}_bias"] for kind in ("gate", "up", "down")] if family in BIASED else None
        parameters = config.swiglu_limit, config.swiglu_alpha, biases
        exact = compute(known["x"], *tokens[1:], *map(torch.from_numpy, matrices), *parameters)
        assert error(out, exact) < LIMIT
        if family not in ALONE:
            assert error(out, known["experts"]) < LIMIT


@pytest.mark.parametrize("family", BLOCKS)
def test_a_block_with_its_router(family, toys):
    path = toys / family / "hub"
    config = model_config(path)
    for layer, known in reference(toys / family).items():
        logits = known["x"] @ known["router"].T
        chosen, ids = logits.topk(TOP_K)  # all three give the chosen ones a sum of 1
        out = load(path, config, layer, "auto").forward(known["x"].bfloat16(), ids, chosen.softmax(dim=1))
        assert error(out, known["block"]) < LIMIT


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama4_text", "granitemoe"])
def test_the_comparison_sees_gate_and_up_swapped(family, toys):
    path, layers = toys / family / "hub", reference(toys / family)
    layer, known = layers.popitem()
    wrapper = load(path, model_config(path), layer, "BF16")
    wrapper.load_weights_from_tensors(known["up"], known["gate"], known["down"])
    out = wrapper.forward(known["x"].bfloat16(), known["ids"], known["weights"])
    assert error(out, known["experts"]) > 0.5


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("method", ["BF16", "AMXINT8"])
@pytest.mark.parametrize("names", ["hub", "memory", "mxfp4"])
@pytest.mark.parametrize("family", SWIGLUOAI)
def test_activation_and_biases_are_found(family, names, method, nodes, toys):
    if names == "mxfp4" and family != "gpt_oss":
        pytest.skip("only gpt-oss has files of its own in MXFP4")
    path, layers = toys / family / names, reference(toys / family)
    config = model_config(path)
    assert (config.activation, config.swiglu_alpha) == ("swigluoai", 1.702)
    for layer, known in layers.items():
        wrapper = load(path, config, layer, method, threadpool_count=nodes)
        assert wrapper.moe.biases == (family in BIASED)
        out = wrapper.forward(known["x"].bfloat16(), known["ids"], known["weights"])
        assert error(out, known["experts"]) < (LIMIT if method == "BF16" else 0.03)


@pytest.mark.parametrize("family", BIASED)
def test_the_comparison_sees_the_activation_and_each_bias(family, toys):
    path, layers = toys / family / "hub", reference(toys / family)
    config = model_config(path)
    layer, known = layers.popitem()
    tokens = known["x"].bfloat16(), known["ids"], known["weights"]
    exact = known["experts"]
    limits = {"swiglu_limit": config.swiglu_limit, "swiglu_alpha": config.swiglu_alpha}
    assert error(load(path, config, layer, "BF16", **limits).forward(*tokens), exact) > 5 * LIMIT  # clamps both sides
    assert error(load(path, config, layer, "BF16", activation="silu").forward(*tokens), exact) > 5 * LIMIT
    wrapper = load(path, config, layer, "BF16")
    matrices = [known[kind] for kind in ("gate", "up", "down")]
    biases = [known[f"{kind}_bias"] for kind in ("gate", "up", "down")]
    wrapper.load_weights_from_tensors(*matrices, biases=biases)
    assert error(wrapper.forward(*tokens), exact) < LIMIT
    for part in range(3):
        changed = [0 * bias if index == part else bias for index, bias in enumerate(biases)]
        wrapper.load_weights_from_tensors(*matrices, biases=changed)
        assert error(wrapper.forward(*tokens), exact) > 3 * LIMIT
