"""KTMoEWrapper on encoded checkpoints as models have them: method="auto" keeps codes and scales."""

import json
from functools import partial

import encoded_weights as made
import numpy as np
import pytest
from layer_reference import Shape
from weight_files import checkpoint_tensors, originals, write_safetensors
from wrapper_cases import assert_right, batch, make, tensors

from kt_kernel import _core
from kt_kernel.methods import GROUP_SIZES, METHODS

SHAPE = Shape(experts=3, top_k=2, hidden=256, intermediate=384)

# How models on the hub have their experts: encoder, name of layer 7, names of the matrices, method.
FAMILIES = {
    "DeepSeek V3": (made.fp8_block, "model.layers.7", "mlp", "FP8"),
    "Qwen3 FP8": (partial(made.fp8_block, dtype="BF16"), "model.layers.7", "mlp", "FP8"),
    "Qwen3.5 FP8": (partial(made.fp8_block, dtype="F16"), "model.language_model.layers.7", "mlp", "FP8"),
    "MiniMax-M2": (made.fp8_block, "model.layers.7", "block_sparse_moe", "FP8"),
    "Mistral": (partial(made.fp8_block, suffix="weight_scale"), "layers.7", "experts", "FP8"),
    "GLM-4.5 FP8": (partial(made.fp8_channel, dtype="BF16", ndim=2), "model.layers.7", "mlp", "FP8_PERCHANNEL"),
    "GLM-4.6 FP8": (made.fp8_channel, "model.layers.7", "mlp", "FP8_PERCHANNEL"),
    "Kimi-K2": (made.rawint4, "model.layers.7", "mlp", "RAWINT4"),
    "Kimi-K2.5": (made.rawint4, "language_model.model.layers.7", "mlp", "RAWINT4"),
    "GPTQ": (partial(made.gptq, group=128, zeros="symmetric", order="plain"), "model.layers.7", "mlp", "GPTQ_INT4"),
    "AWQ": (partial(made.awq, group=128), "model.layers.7", "mlp", "AWQ"),
    "DeepSeek V4": (made.mxfp4, "layers.7", "ffn", "MXFP4"),
    "MiniMax-M3": (made.mxfp8, "language_model.model.layers.7", "block_sparse_moe", "MXFP8"),
    "ModelOpt": (made.nvfp4, "model.layers.7", "mlp", "NVFP4"),
}


def write(folder, encode, base="model.layers.7", naming="mlp", config=None):
    tensors, dtypes, meaning = made.make_layer_tensors(encode, SHAPE, base, naming)
    write_safetensors(folder / "model.safetensors", tensors, dtypes=dtypes)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return meaning


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family, nodes, tmp_path):
    encode, base, naming, method = FAMILIES[family]
    meaning = write(tmp_path, encode, base, naming)
    wrapper = make(SHAPE, "auto", layer_idx=7, weight_path=tmp_path, threadpool_count=nodes)
    assert wrapper.method == method
    wrapper.load_weights([2, 0, 1])
    for slot, expert in enumerate([2, 0, 1]):
        for got, exact in zip(wrapper.moe.decode_expert(slot), meaning[expert], strict=True):
            np.testing.assert_allclose(got, exact.astype(np.float32), rtol=2**-23)
    for count in (1, 40):
        tokens = batch(SHAPE, count)
        assert_right(wrapper, wrapper.forward(*tokens), *tokens)


def test_every_method_that_keeps_codes_has_a_family():
    assert {method for *_, method in FAMILIES.values()} == set(GROUP_SIZES)


@pytest.mark.parametrize("config", [{"quantization_config": {"checkpoint_format": "gptq_v2"}}, None])
@pytest.mark.parametrize("method", ["auto", "BF16"])
def test_gptq_of_version_2_stores_zeros_as_they_are(method, config, tmp_path):
    """Config.json tells it; without it uneven zeros are read as those of version 1."""
    meaning = write(tmp_path, partial(made.gptq, zeros="version 2"), config=config)
    wrapper = make(SHAPE, method, layer_idx=7, weight_path=tmp_path)
    wrapper.load_weights()
    right = [
        np.abs(got - exact).max() < 1e-2 * np.abs(exact).max()
        for got, exact in zip(wrapper.moe.decode_expert(1), meaning[1], strict=True)
    ]
    assert all(right) if config else not any(right)


def test_symmetric_gptq_of_version_2(tmp_path):
    write(tmp_path, partial(made.gptq, zeros="symmetric version 2"))
    wrapper = make(SHAPE, "GPTQ_INT4", layer_idx=7, weight_path=tmp_path)
    with pytest.raises(ValueError, match=r"qzeros' holds 8 everywhere; .*checkpoint_format 'gptq_v2'"):
        wrapper.load_weights()
    assert wrapper.moe is None


def refused(folder, method: str, message: str, **options) -> None:
    wrapper = make(SHAPE, method, layer_idx=7, weight_path=folder, **options)
    with pytest.raises(ValueError, match=message):
        wrapper.load_weights()
    assert wrapper.moe is None


@pytest.mark.parametrize("zeros", ["any", "symmetric"])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("nodes", [1, 2])
def test_columns_in_the_order_of_their_groups(nodes, group, zeros, tmp_path):
    """Act-order: what down sorts is in the rows of gate and up, what they sort is done to the input."""
    meaning = write(tmp_path, partial(made.gptq, order="shared", group=group, zeros=zeros))
    wrapper = make(SHAPE, "auto", layer_idx=7, weight_path=tmp_path, threadpool_count=nodes)
    assert wrapper.method == "GPTQ_INT4"
    wrapper.load_weights([2, 0, 1])
    depth = SHAPE.intermediate
    order = np.argsort(np.random.default_rng(depth).permutation(np.arange(depth) // group), kind="stable")
    for slot, expert in enumerate([2, 0, 1]):
        gate, up, down = meaning[expert]
        expected = gate[order], up[order], down[:, order]
        for got, exact in zip(wrapper.moe.decode_expert(slot), expected, strict=True):
            np.testing.assert_allclose(got, exact.astype(np.float32), rtol=2**-23)
    for count in (1, 6, 40):
        tokens = batch(SHAPE, count)
        assert_right(wrapper, wrapper.forward(*tokens), *tokens)


def test_columns_of_gate_and_up_in_different_orders_need_decoding(tmp_path):
    write(tmp_path, partial(made.gptq, order="random"))
    refused(tmp_path, "auto", r"gate and up of expert 0 have columns in different orders.*use method='BF16'")


def test_groups_of_several_sizes_need_decoding(tmp_path):
    def uneven(*arguments):
        tensors, meaning = made.gptq(*arguments, order="plain", group=128)
        tensors["g_idx"][1][100:128] = 1
        return tensors, meaning

    write(tmp_path, uneven)
    refused(tmp_path, "auto", r"g_idx' has groups of several sizes; GPTQ_INT4 keeps groups of \d+.*method='BF16'")


def test_orders_of_columns_are_not_kept_in_a_store(tmp_path, monkeypatch):
    monkeypatch.setenv("KT_KERNEL_WEIGHT_STORE", str(tmp_path / "store"))
    write(tmp_path, partial(made.gptq, order="shared"))
    for _ in range(2):
        wrapper = make(SHAPE, "auto", layer_idx=7, weight_path=tmp_path)
        wrapper.load_weights()
        tokens = batch(SHAPE, 3)
        assert_right(wrapper, wrapper.forward(*tokens), *tokens)
    assert wrapper.moe.has_columns
    assert not list(tmp_path.glob("store/*.ktpack"))


def test_columns_must_be_an_order():
    layer = make(SHAPE, "GPTQ_INT4")._layer
    with pytest.raises(ValueError, match=r"columns must hold each of 0\.\.255 once"):
        layer.load_encoded(0, *_matrices(), np.zeros(256, np.int32))


def test_an_order_goes_with_the_weights_it_came_with():
    layer, plain = (make(SHAPE, "GPTQ_INT4")._layer for _ in range(2))
    plain.load_encoded(0, *_matrices())
    layer.load_encoded(0, *_matrices(), np.arange(256, dtype=np.int32)[::-1].copy())
    turned, gate = (made_of.decode_expert(0)[0] for made_of in (layer, plain))
    np.testing.assert_array_equal(turned, gate[:, ::-1])
    layer.load_encoded(0, *_matrices())
    np.testing.assert_array_equal(layer.decode_expert(0)[0], gate)


def _matrices():
    for rows, depth in ((384, 256), (384, 256), (256, 384)):
        codes = np.random.default_rng(depth).integers(0, 256, (rows, depth // 2), dtype=np.uint8)
        scales = np.full((rows, -(-depth // 128)), 0x3C00, np.uint16)  # 1 in f16
        yield _core.EncodedMatrix(codes, scales)


def test_scales_that_would_be_rounded_need_decoding(tmp_path):
    for encode in (made.rawint4, made.gptq, made.awq):
        write(tmp_path, partial(encode, dtype="F32"))
        refused(tmp_path, "auto", r"gate_proj\.\w*scales?' is F32 and has scales that .* would round.*method='BF16'")


def test_groups_that_no_kernel_takes_need_decoding(tmp_path):
    write(tmp_path, partial(made.fp8_block, block=(16, 16)))
    refused(tmp_path, "auto", r"weight_scale_inv' is F32 \[24, 16\]; needed is 2 in dimension 1.*method='BF16'")


def test_weights_that_come_after_the_layer(tmp_path):
    """Their group size is then the usual one."""
    late = make(SHAPE, "RAWINT4", layer_idx=7, weight_path=tmp_path)
    write(tmp_path, made.rawint4)
    late.load_weights()
    other = make(SHAPE, "RAWINT4", layer_idx=7, weight_path=tmp_path / "other")
    write(tmp_path / "other", partial(made.rawint4, group=64))
    with pytest.raises(ValueError, match=r"weight_scale' is BF16 \[384, 4\].* groups of 32\. Make it when the weights"):
        other.load_weights()


@pytest.mark.parametrize("method", GROUP_SIZES)
def test_an_encoding_that_does_not_fit(method, tmp_path):
    for name, (encode, *_, own) in FAMILIES.items():
        folder = tmp_path / name
        write(folder, encode)
        if METHODS[method] != METHODS[own] and {method, own} - {"RAWINT4", "GPTQ_INT4", "AWQ"}:
            refused(folder, method, rf"gate_proj\.\w+' is in .*\(method .*{method}.*use method='{own}', or .*'BF16'")
    plain = tmp_path / "plain"
    write_safetensors(plain / "model.safetensors", checkpoint_tensors(originals(SHAPE), "model.layers.7", "separate"))
    refused(plain, method, r"gate_proj\.weight' is BF16, in no encoding that this layer could keep: use method='BF16'")


@pytest.mark.parametrize("method", GROUP_SIZES)
def test_tensors_in_memory_are_not_taken(method, tmp_path):
    wrapper = make(SHAPE, method)
    with pytest.raises(ValueError, match=rf"method {method} keeps the codes of a checkpoint.* method='BF16'"):
        wrapper.load_weights_from_tensors(*tensors(SHAPE))
    assert wrapper.moe is None
