"""Experts under the names of gpt-oss: bf16 as transformers writes it, and MXFP4 as its own files have it."""

import json

import numpy as np
import pytest
from encoded_weights import E2M1, E8M0
from layer_reference import Activation, Shape, random_batch, random_biases, shared_pool, to_bf16
from weight_files import checkpoint_tensors, decoded, originals, same, write_safetensors
from wrapper_cases import assert_right, batch, make, tensors, torch

from kt_kernel import _core
from kt_kernel.methods import GROUP_SIZES, format_of
from kt_kernel.weights import (
    MissingTensorError,
    find_method,
    load_layer,
    load_layer_from_tensors,
    model_config,
    save_layer,
)

SHAPE = Shape(experts=3, top_k=2, hidden=64, intermediate=160)
BASE = "model.layers.7.mlp.experts"
BIASES = [tuple(to_bf16(bias) for bias in biases) for biases in random_biases(SHAPE)]


def alternate(gates: np.ndarray, ups: np.ndarray) -> np.ndarray:
    """[E, I, ...] twice -> [E, 2I, ...]"""
    return np.stack([gates, ups], axis=2).reshape(len(gates), -1, *gates.shape[2:])


def bias_tensors() -> dict[str, np.ndarray]:
    gates, ups, downs = (np.stack(biases) for biases in zip(*BIASES, strict=True))
    return {f"{BASE}.gate_up_proj_bias": alternate(gates, ups), f"{BASE}.down_proj_bias": downs}


def plain(beside: bool = False) -> dict[str, np.ndarray]:
    gates, ups, downs = (np.stack(matrices) for matrices in zip(*originals(SHAPE), strict=True))
    both = np.concatenate([gates, ups], axis=1) if beside else alternate(gates, ups)
    matrices = {f"{BASE}.gate_up_proj": both, f"{BASE}.down_proj": downs}
    return {name: array.transpose(0, 2, 1).copy() for name, array in matrices.items()} | bias_tensors()


def mxfp4(rng: np.random.Generator, most: int = 252) -> tuple[dict[str, np.ndarray], list]:
    """Random codes, scales of all sizes that bf16 holds (kept: below 217), and what they mean, element by element."""
    found, meaning = bias_tensors(), []
    for name, rows, depth in (
        ("gate_up_proj", 2 * SHAPE.intermediate, SHAPE.hidden),
        ("down_proj", SHAPE.hidden, SHAPE.intermediate),
    ):
        blocks = rng.integers(0, 256, (SHAPE.experts, rows, depth // 32, 16), np.uint8)
        scales = rng.integers(2, most, blocks.shape[:3], np.uint8)
        found |= {f"{BASE}.{name}_blocks": blocks, f"{BASE}.{name}_scales": scales}
        values = np.empty((SHAPE.experts, rows, depth))
        for k in range(depth):
            group, byte, nibble = k // 32, k % 32 // 2, k % 2
            codes = blocks[:, :, group, byte] >> (4 * nibble) & 15
            values[:, :, k] = E2M1[codes] * E8M0[scales[:, :, group]]
        meaning.append(values.astype(np.float32))
    both, down = meaning
    return found, [(both[e, ::2], both[e, 1::2], down[e]) for e in range(SHAPE.experts)]


def write(folder, found: dict[str, np.ndarray], **config):
    write_safetensors(folder / "model.safetensors", found)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def layer(biases: bool = True, threads: tuple[int, ...] = (1,), method: str = "BF16") -> "_core.MoELayer":
    return _core.MoELayer(
        shared_pool(threads),
        format=format_of(method),
        group_size=GROUP_SIZES.get(method, 0),
        num_experts=SHAPE.experts,
        top_k=SHAPE.top_k,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.intermediate,
        max_tokens=8,
        biases=biases,
    )


@pytest.mark.parametrize("threads", [(1,), (1, 1)])
@pytest.mark.parametrize("method", ["BF16", "MXFP4"])
def test_mxfp4_is_decoded_or_kept_exactly(method, threads, tmp_path):
    found, meaning = mxfp4(np.random.default_rng(0), 252 if method == "BF16" else 217)
    for path in (write(tmp_path, found), tmp_path / "model.safetensors"):
        made = layer(threads=threads, method=method)
        load_layer(made, method, path, 7)
        assert made.loaded_experts == SHAPE.experts
        assert same(decoded(made), meaning)


@pytest.mark.parametrize("config", [{}, {"model_type": "gpt_oss"}, {"model_type": "openai_privacy_filter"}])
def test_the_model_tells_the_order_of_gate_and_up(config, tmp_path):
    beside = config.get("model_type") == "openai_privacy_filter"
    made = layer()
    load_layer(made, "BF16", write(tmp_path, plain(beside), **config), 7)
    expected = layer(biases=False)
    for expert, matrices in enumerate(originals(SHAPE)):
        expected.load_expert(expert, *matrices)
    assert same(decoded(made), decoded(expected))


@pytest.mark.parametrize("path", [".", "model.safetensors"])
@pytest.mark.parametrize("config", [{}, {"model_type": "gpt_oss", "swiglu_limit": 0.5, "swiglu_alpha": 1.5}])
def test_a_wrapper_needs_no_arguments(config, path, tmp_path):
    write(tmp_path, plain(), **config)
    wrapper = make(SHAPE, layer_idx=7, weight_path=tmp_path / path, method="auto")
    wrapper.load_weights([2, 0, 1])
    activation = Activation(config.get("swiglu_limit", 7.0), config.get("swiglu_alpha", 1.702), "swigluoai")
    tokens = batch(SHAPE, 7)
    biases = [[(b.astype(np.uint32) << 16).view(np.float32) for b in BIASES[e]] for e in (2, 0, 1)]
    assert_right(wrapper, wrapper.forward(*tokens), *tokens, activation=activation, biases=biases)


def test_arguments_overrule_what_is_there(tmp_path):
    write(tmp_path, plain(), model_type="gpt_oss")
    biases = [[(b.astype(np.uint32) << 16).view(np.float32) for b in biases] for biases in BIASES]
    for arguments, activation in (
        ({"swiglu_limit": 0.5}, Activation(0.5)),
        ({"swiglu_limit": 0.5, "swiglu_alpha": 1.5}, Activation(0.5, 1.5)),
        ({"activation": "silu"}, Activation()),
        ({"activation": "swigluoai", "swiglu_limit": 0.5}, Activation(0.5, 1.702, "swigluoai")),
    ):
        wrapper = make(SHAPE, layer_idx=7, weight_path=tmp_path, **arguments)
        wrapper.load_weights()
        tokens = batch(SHAPE, 7)
        assert_right(wrapper, wrapper.forward(*tokens), *tokens, activation=activation, biases=biases)


def test_methods(tmp_path):
    assert find_method(write(tmp_path / "plain", plain()), 7, 64, 160) == "BF16"
    assert find_method(write(tmp_path / "mxfp4", mxfp4(np.random.default_rng(0))[0]), 7, 64, 160) == "MXFP4"


@pytest.mark.parametrize("stored", ["plain", "mxfp4"])
@pytest.mark.parametrize("method", ["AMXINT8", "AMXINT4", "INT4G"])
def test_converted_experts_keep_their_biases(method, stored, tmp_path):
    """A wrapper of the converted folder computes what one of the source does, to the bit, without being told more."""
    found = plain() if stored == "plain" else mxfp4(np.random.default_rng(0), 130)[0]
    config = {"model_type": "gpt_oss", "swiglu_limit": 0.5, "swiglu_alpha": 1.5}
    source = write(tmp_path / "source", found, **config)
    converted = write(tmp_path / "out", {}, **config)
    (converted / "model.safetensors").unlink()
    save_layer(shared_pool((1,)), method, source, 7, converted)
    outputs = []
    for path, asked in ((source, method), (converted, "auto")):
        wrapper = make(SHAPE, layer_idx=7, weight_path=path, method=asked)
        wrapper.load_weights([2, 0, 1])
        outputs.append(wrapper.forward(*batch(SHAPE, 7)))
    assert torch.equal(*outputs)


def test_saved_tensors_keep_their_biases(tmp_path):
    gate, up, down = (np.stack(matrices) for matrices in zip(*originals(SHAPE), strict=True))
    biases = [np.stack(of) for of in zip(*BIASES, strict=True)]
    first, second = layer(method="INT4G"), layer(method="INT4G")
    load_layer_from_tensors(first, "INT4G", gate, up, down, save_to=tmp_path, layer_idx=7, biases=biases)
    load_layer(second, "INT4G", tmp_path, 7)
    x, ids, weights = random_batch(SHAPE, 5)
    outputs = []
    for made in (first, second):
        outputs.append(np.empty((5, SHAPE.hidden), np.uint16))
        made.forward(5, ids.ctypes.data, weights.ctypes.data, x.ctypes.data, outputs[-1].ctypes.data)
    assert np.array_equal(*outputs)
    with pytest.raises(ValueError, match="the experts have biases, and this layer was made without"):
        load_layer(layer(biases=False, method="INT4G"), "INT4G", tmp_path, 7)


def test_biases_and_layers_that_do_not_fit(tmp_path):
    with_biases, without = write(tmp_path / "with", plain()), tmp_path / "without"
    with pytest.raises(
        ValueError, match="the experts have biases, and this layer was made without: make it with biase"
    ):
        load_layer(layer(biases=False), "BF16", with_biases, 7)
    write(without, checkpoint_tensors(originals(SHAPE), "model.layers.7", "separate"))
    with pytest.raises(ValueError, match="the experts have no biases, which this layer needs"):
        load_layer(layer(), "BF16", without, 7)
    late = make(SHAPE, layer_idx=7, weight_path=tmp_path / "late")
    write(tmp_path / "late", plain())
    with pytest.raises(ValueError, match="KTMoEWrapper does so if the weights are there when it is made"):
        late.load_weights()


def broken(name: str, array: np.ndarray | None = None) -> dict[str, np.ndarray]:
    found, _ = mxfp4(np.random.default_rng(0))
    found = plain() if name.endswith("proj") else found
    found[f"{BASE}.{name}"] = array
    return {name: array for name, array in found.items() if array is not None}


@pytest.mark.parametrize(
    ("found", "error", "message"),
    [
        (broken("down_proj_bias"), MissingTensorError, "has no tensor 'model.layers.7.mlp.experts.down_proj_bias'"),
        (
            broken("gate_up_proj_bias"),
            MissingTensorError,
            "has no tensor 'model.layers.7.mlp.experts.gate_up_proj_bias'",
        ),
        (broken("gate_up_proj_scales"), MissingTensorError, "has no tensor .*gate_up_proj_scales"),
        (broken("down_proj_bias", np.zeros((3, 63), np.uint16)), ValueError, r"is BF16 \[3, 63\]; needed is BF16 or"),
        (
            broken("down_proj_scales", np.zeros((3, 64, 4), np.uint8)),
            ValueError,
            r"\[3, 64, 4\]; needed is U8 \[3, 64, 5\]",
        ),
        (broken("down_proj_scales", np.full((3, 64, 5), 255, np.uint8)), ValueError, "codes that mean NaN"),
        (broken("down_proj_blocks", np.zeros((3, 64, 5, 8), np.uint8)), ValueError, r"needed is U8 \[3, 64, 5, 16\]"),
        (
            broken("gate_up_proj", np.zeros((3, 320, 64), np.uint16)),
            ValueError,
            r"needed are \[E, H, 2I\] and \[E, I, H\]",
        ),
    ],
)
def test_damaged_checkpoints(found, error, message, tmp_path):
    with pytest.raises(error, match=message):
        load_layer(layer(), "BF16", write(tmp_path, found), 7)


def test_an_order_that_is_not_known(tmp_path):
    write(tmp_path, plain(), model_type="llama4_text")
    with pytest.raises(
        ValueError, match=r"gate_up_proj_bias'\), .* of gpt_oss and openai_privacy_filter only, not of lla"
    ):
        load_layer(layer(), "BF16", tmp_path, 7)


def test_tensors_with_biases(tmp_path):
    gates, ups, downs = (np.stack(biases) for biases in zip(*random_biases(SHAPE), strict=True))
    wrapper = make(SHAPE, biases=True, activation="swigluoai")
    wrapper.load_weights_from_tensors(*tensors(SHAPE), biases=(gates, ups, downs))
    tokens = batch(SHAPE, 7)
    activation = Activation(7.0, 1.702, "swigluoai")
    assert_right(wrapper, wrapper.forward(*tokens), *tokens, activation=activation, biases=random_biases(SHAPE))
    with pytest.raises(ValueError, match="the tensors: the experts have no biases, which this layer needs"):
        wrapper.load_weights_from_tensors(*tensors(SHAPE))
    with pytest.raises(ValueError, match=r"up_bias has shape \[3, 64\]; it must be \[3, 160\]"):
        wrapper.load_weights_from_tensors(*tensors(SHAPE), biases=(gates, downs, downs))
    with pytest.raises(TypeError, match="down_bias holds float64"):
        wrapper.load_weights_from_tensors(*tensors(SHAPE), biases=(gates, ups, downs.astype(np.float64)))
    with pytest.raises(ValueError, match="the tensors: the experts have biases, and this layer was made without"):
        make(SHAPE).load_weights_from_tensors(*tensors(SHAPE), biases=(gates, ups, downs))
    options = {"layer_idx": 7, "biases": True, "activation": "swigluoai", "weight_path": tmp_path}
    saving, loading = make(SHAPE, "AMXINT4", cpu_save=True, **options), make(SHAPE, "AMXINT4", **options)
    saving.load_weights_from_tensors(*tensors(SHAPE), biases=(gates, ups, downs))
    loading.load_weights()
    assert torch.equal(saving.forward(*tokens), loading.forward(*tokens))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0}, ("swigluoai", 7.0, 1.702)),
        ({"model_type": "gpt_oss"}, ("swigluoai", 7.0, 1.702)),
        ({"model_type": "minimax_m3", "hidden_act": "swigluoai", "swiglu_alpha": 1.5}, ("swigluoai", 7.0, 1.5)),
        ({"model_type": "deepseek_v4", "hidden_act": "silu", "swiglu_limit": 10.0}, ("silu", 10.0, 0.0)),
        ({"model_type": "mixtral"}, ("silu", 0.0, 0.0)),
    ],
)
def test_the_activation_of_a_model(fields, expected, tmp_path):
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "intermediate_size": 96, **fields}))
    config = model_config(tmp_path)
    assert (config.activation, config.swiglu_limit, config.swiglu_alpha) == expected
