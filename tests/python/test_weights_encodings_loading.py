"""Every encoding, loaded through load_layer: bf16 to the bit, other formats as from bf16."""

from functools import partial

import encoded_weights as made
import numpy as np
import pytest
from layer_reference import Shape, shared_pool, to_bf16
from weight_files import METHODS, as_loaded, decoded, make_layer, originals, same, write_safetensors

from kt_kernel.weights import load_layer, save_layer
from kt_kernel.weights.encodings import ENCODINGS, find
from kt_kernel.weights.tensor_files import TensorFiles

PLAIN = Shape(experts=3, top_k=2, hidden=256, intermediate=384)
RAGGED = Shape(experts=3, top_k=2, hidden=136, intermediate=200)  # multiples of 8, not of 16, 32 or 128
ODD = Shape(experts=3, top_k=2, hidden=99, intermediate=259)

# name -> encoder, the encoding that it must be found as, and a shape
CASES = {
    "fp8_block": (made.fp8_block, "FP8 block", PLAIN),
    "fp8_block_ragged": (made.fp8_block, "FP8 block", ODD),
    "fp8_block_bf16_scales": (partial(made.fp8_block, dtype="BF16"), "FP8 block", RAGGED),
    "fp8_block_f16_scales": (partial(made.fp8_block, dtype="F16"), "FP8 block", RAGGED),
    "fp8_block_64x32": (partial(made.fp8_block, block=(64, 32)), "FP8 block", ODD),
    "fp8_block_as_weight_scale": (partial(made.fp8_block, suffix="weight_scale"), "FP8 block", ODD),
    "fp8_channel": (made.fp8_channel, "FP8 per channel", ODD),
    "fp8_channel_column": (partial(made.fp8_channel, ndim=2, dtype="BF16"), "FP8 per channel", ODD),
    "fp8_channel_f16": (partial(made.fp8_channel, dtype="F16"), "FP8 per channel", RAGGED),
    "fp8_tensor": (made.fp8_tensor, "FP8 per channel", ODD),
    "fp8_tensor_bf16": (partial(made.fp8_tensor, dtype="BF16", shape=(1,)), "FP8 per channel", PLAIN),
    "mxfp8": (made.mxfp8, "MXFP8", PLAIN),
    "mxfp8_ragged": (partial(made.mxfp8, dtype="F8_E8M0"), "MXFP8", ODD),
    "mxfp4": (made.mxfp4, "MXFP4", PLAIN),
    "mxfp4_ragged": (partial(made.mxfp4, dtype="U8", scale_dtype="U8"), "MXFP4", RAGGED),
    "nvfp4": (made.nvfp4, "NVFP4", PLAIN),
    "nvfp4_ragged": (partial(made.nvfp4, ndim=1), "NVFP4", RAGGED),
    "rawint4": (made.rawint4, "RAWINT4", PLAIN),
    "rawint4_64": (partial(made.rawint4, group=64, dtype="F16", with_shape=False), "RAWINT4", PLAIN),
    "rawint4_128": (partial(made.rawint4, group=128, element_bytes=1), "RAWINT4", PLAIN),
    "rawint4_rows": (partial(made.rawint4, group=0, dtype="F32"), "RAWINT4", ODD),
    "rawint4_ragged": (partial(made.rawint4, dtype="F32"), "RAWINT4", RAGGED),
    "rawint4_odd": (made.rawint4, "RAWINT4", ODD),
    "rawint4_odd_bytes": (partial(made.rawint4, element_bytes=1), "RAWINT4", ODD),
    "gptq": (partial(made.gptq, zeros="symmetric"), "GPTQ", PLAIN),
    "gptq_no_zeros": (partial(made.gptq, zeros="absent", group=128, order="plain"), "GPTQ", PLAIN),
    "gptq_zeros": (partial(made.gptq, dtype="F32"), "GPTQ", RAGGED),
    "gptq_act_order": (partial(made.gptq, order="random", dtype="BF16"), "GPTQ", PLAIN),
    "gptq_act_order_symmetric": (partial(made.gptq, order="random", zeros="symmetric", group=64), "GPTQ", RAGGED),
    "awq": (made.awq, "AWQ", PLAIN),
    "awq_ragged": (made.awq, "AWQ", RAGGED),
    "awq_128_f32": (partial(made.awq, group=128, dtype="F32"), "AWQ", PLAIN),
}


def in_bf16(meaning) -> list[tuple[np.ndarray, ...]]:
    return [tuple(made.nearest_bf16(matrix).astype(np.float32) for matrix in expert) for expert in meaning]


def load(path, weight_format, shape, threads=(1,), **options):
    layer = make_layer(shape, weight_format, threads)
    load_layer(layer, METHODS[weight_format], path, 7, **options)
    return decoded(layer)


@pytest.mark.parametrize("case", CASES)
def test_bf16_is_exact_and_the_rest_as_from_bf16(case, tmp_path):
    encode, name, shape = CASES[case]
    tensors, dtypes, meaning = made.make_layer_tensors(encode, shape)
    path = write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    expected = in_bf16(meaning)
    assert find(TensorFiles(path), "model.layers.7.mlp.experts.0.up_proj").name == name
    assert same(load(tmp_path, "bf16", shape), expected)
    bits = [tuple(to_bf16(matrix) for matrix in expert) for expert in expected]
    for weight_format in ("int8", "int4", "int4g"):
        assert same(load(tmp_path, weight_format, shape), as_loaded(shape, weight_format, bits))


def test_every_encoding_has_a_case():
    assert {name for _, name, _ in CASES.values()} == {encoding.name for encoding in ENCODINGS}


@pytest.mark.parametrize("case", ["fp8_block_ragged", "rawint4_odd", "gptq_act_order", "awq", "mxfp4", "nvfp4"])
def test_maps_skips_and_nodes(case, tmp_path):
    encode, _, shape = CASES[case]
    tensors, dtypes, meaning = made.make_layer_tensors(encode, shape)
    write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    expected = in_bf16(meaning)
    assert same(load(tmp_path, "bf16", shape, (1, 1), physical_to_logical=[2, 0, 1]), [expected[e] for e in (2, 0, 1)])
    some = load(tmp_path, "bf16", shape, physical_to_logical=[1, 1, 0], skip=[False, False, True])
    assert same(some[:2], [expected[1]] * 2)
    assert not some[2][0].any()


@pytest.mark.parametrize("naming", made.MATRIX_NAMES)
@pytest.mark.parametrize("base", ["model.layers.7", "language_model.model.layers.7", "layers.7"])
@pytest.mark.parametrize("encode", [made.mxfp4, made.rawint4, made.fp8_block], ids=["mxfp4", "rawint4", "fp8_block"])
def test_every_name(naming, base, encode, tmp_path):
    tensors, dtypes, meaning = made.make_layer_tensors(encode, RAGGED, base, naming)
    write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    assert same(load(tmp_path, "bf16", RAGGED), in_bf16(meaning))


@pytest.mark.parametrize("pad", range(4))
def test_data_may_start_at_any_byte_and_lie_in_several_files(pad, tmp_path):
    tensors, dtypes, meaning = made.make_layer_tensors(made.gptq, RAGGED)
    for part in (0, 1):
        chosen = {name: tensor for number, (name, tensor) in enumerate(tensors.items()) if number % 2 == part}
        write_safetensors(tmp_path / f"{part}.safetensors", chosen, dtypes=dtypes, pad=pad)
    assert same(load(tmp_path, "bf16", RAGGED), in_bf16(meaning))


def test_matrices_of_one_layer_may_differ(tmp_path):
    """Some models keep a few matrices in more bits."""
    tensors, dtypes, meaning = made.make_layer_tensors(made.nvfp4, PLAIN)
    rng, stem = np.random.default_rng(5), "model.layers.7.mlp.experts.1.down_proj"
    parts, exact = made.fp8_channel(rng, PLAIN.hidden, PLAIN.intermediate)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(stem)}
    tensors |= {f"{stem}.{suffix}": array for suffix, (_, array) in parts.items()}
    dtypes |= {f"{stem}.{suffix}": dtype for suffix, (dtype, _) in parts.items()}
    plain = originals(PLAIN)[2][0]
    tensors["model.layers.7.mlp.experts.2.gate_proj.weight"] = plain
    dtypes["model.layers.7.mlp.experts.2.gate_proj.weight"] = "BF16"
    write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    meaning[1] = (*meaning[1][:2], exact)
    meaning[2] = ((plain.astype(np.uint32) << 16).view(np.float32), *meaning[2][1:])
    assert same(load(tmp_path, "bf16", PLAIN), in_bf16(meaning))


@pytest.mark.parametrize("case", [name for name in CASES if name not in {"rawint4_odd_bytes"}])
def test_converted_files_hold_what_a_layer_would_get(case, tmp_path):
    encode, _, shape = CASES[case]
    tensors, dtypes, _ = made.make_layer_tensors(encode, shape)
    write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    save_layer(shared_pool((1,)), "AMXINT8", tmp_path, 7, tmp_path / "out")
    assert same(load(tmp_path / "out", "int8", shape), load(tmp_path, "int8", shape))


def test_the_ends_of_the_scales_are_exact(tmp_path):
    """Subnormal bf16, and the largest scales that are taken."""
    shape = Shape(1, 1, 64, 64)
    tensors, dtypes, _ = made.make_layer_tensors(made.mxfp8, shape)
    meaning = []
    for p in ("gate", "up", "down"):
        stem = f"model.layers.7.mlp.experts.0.{p}_proj"
        scales = np.tile(np.uint8([[0, 246], [3, 240], [1, 200], [2, 100]]), (16, 1))
        tensors[f"{stem}.weight_scale_inv"] = scales
        codes = tensors[f"{stem}.weight"]
        meaning.append(made.E4M3[codes] * made.spread(made.E8M0[scales], (64, 64), (1, 32)))
    write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    assert same(load(tmp_path, "bf16", shape), in_bf16([tuple(meaning)]))
