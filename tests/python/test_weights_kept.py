"""Encoded checkpoints in layers that keep codes and scales: every weight to the bit of f32, on any number of nodes."""

import json
from functools import partial

import encoded_weights as made
import numpy as np
import pytest
from layer_reference import Shape
from test_weights_encodings_loading import CASES, ODD, PLAIN, RAGGED
from weight_files import decoded, make_layer, same, write_safetensors

from kt_kernel.methods import METHODS
from kt_kernel.weights import MissingTensorError, choose_format, load_layer
from kt_kernel.weights.encodings import ENCODINGS, find
from kt_kernel.weights.tensor_files import TensorFiles

NODES = [(1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)]
WIDE = Shape(experts=2, top_k=1, hidden=320, intermediate=576)  # nodes do not begin at multiples of a group of 128

# Encoders and shapes beside those of CASES; all are kept, with this format and group size.
KEPT = {
    "fp8_block": ("fp8", 128),
    "fp8_block_ragged": ("fp8", 128),
    "fp8_block_bf16_scales": ("fp8", 128),
    "fp8_block_f16_scales": ("fp8", 128),
    "fp8_block_64x32": ("fp8", 32),
    "fp8_block_as_weight_scale": ("fp8", 128),
    "fp8_block_128x64": ("fp8", 64),
    "fp8_block_wide": ("fp8", 128),
    "fp8_block_256": ("fp8", 256),
    "fp8_channel": ("fp8c", 0),
    "fp8_channel_column": ("fp8c", 0),
    "fp8_channel_f16": ("fp8c", 0),
    "fp8_tensor": ("fp8c", 0),
    "fp8_tensor_bf16": ("fp8c", 0),
    "mxfp8": ("mxfp8", 32),
    "mxfp8_ragged": ("mxfp8", 32),
    "mxfp4": ("mxfp4", 32),
    "mxfp4_ragged": ("mxfp4", 32),
    "nvfp4": ("nvfp4", 16),
    "nvfp4_ragged": ("nvfp4", 16),
    "rawint4": ("rawint4", 32),
    "rawint4_64": ("int4z", 64),
    "rawint4_128": ("rawint4", 128),
    "rawint4_128_wide": ("rawint4", 128),
    "rawint4_96": ("rawint4", 96),
    "rawint4_odd": ("rawint4", 32),
    "rawint4_odd_bytes": ("rawint4", 32),
    "rawint4_one_group": ("rawint4", 512),
    "gptq": ("int4z", 32),
    "gptq_no_zeros": ("int4z", 128),
    "gptq_ragged": ("int4z", 32),
    "gptq_64_wide": ("int4z", 64),
    "gptq_bf16": ("int4z", 32),
    "gptq_128_symmetric": ("int4z", 128),
    "awq": ("int4z", 32),
    "awq_ragged": ("int4z", 32),
    "awq_64_wide": ("int4z", 64),
    "awq_bf16": ("int4z", 128),
}
MORE = {
    "fp8_block_128x64": (partial(made.fp8_block, block=(128, 64)), "FP8 block", WIDE),
    "fp8_block_wide": (made.fp8_block, "FP8 block", WIDE),
    "fp8_block_256": (partial(made.fp8_block, block=(32, 256)), "FP8 block", WIDE),
    "rawint4_128_wide": (partial(made.rawint4, group=128, element_bytes=1), "RAWINT4", Shape(2, 1, 384, 640)),
    "rawint4_96": (partial(made.rawint4, group=96), "RAWINT4", Shape(2, 1, 480, 960)),
    "rawint4_one_group": (partial(made.rawint4, group=0), "RAWINT4", ODD),
    "gptq_ragged": (made.gptq, "GPTQ", RAGGED),
    "gptq_64_wide": (partial(made.gptq, group=64), "GPTQ", WIDE),
    "gptq_bf16": (partial(made.gptq, dtype="BF16", zeros="symmetric"), "GPTQ", PLAIN),
    "gptq_128_symmetric": (partial(made.gptq, group=128, zeros="symmetric", order="plain"), "GPTQ", PLAIN),
    "awq_64_wide": (partial(made.awq, group=64), "AWQ", WIDE),
    "awq_bf16": (partial(made.awq, group=128, dtype="BF16"), "AWQ", PLAIN),
}


def write(folder, encode, shape, **options):
    tensors, dtypes, meaning = made.make_layer_tensors(encode, shape, **options)
    write_safetensors(folder / "model.safetensors", tensors, dtypes=dtypes)
    return tensors, meaning


def in_f32(meaning) -> list[tuple[np.ndarray, ...]]:
    return [tuple(matrix.astype(np.float32) for matrix in expert) for expert in meaning]


def assert_kept(layer, meaning) -> None:
    """NVFP4 has three factors, whose product the decoder rounds twice to f32."""
    if layer.format == "nvfp4":
        for left, right in zip(decoded(layer), in_f32(meaning), strict=True):
            for got, exact in zip(left, right, strict=True):
                np.testing.assert_allclose(got, exact, rtol=2**-23)
    else:
        assert same(decoded(layer), in_f32(meaning))


@pytest.mark.parametrize("case", KEPT)
def test_every_weight_is_exact_on_any_number_of_nodes(case, tmp_path):
    encode, name, shape = (CASES | MORE)[case]
    _, meaning = write(tmp_path, encode, shape)
    method = next(encoding.method for encoding in ENCODINGS if encoding.name == name)
    found = choose_format(method, tmp_path, 7, shape.hidden, shape.intermediate)
    assert found == KEPT[case]
    for threads in NODES[: -(-shape.intermediate // 64)]:
        layer = make_layer(shape, found.format, threads, found.group)
        load_layer(layer, method, tmp_path, 7)
        assert layer.loaded_experts == shape.experts
        assert_kept(layer, meaning)


def test_every_encoding_has_a_case():
    assert {(CASES | MORE)[case][1] for case in KEPT} == {encoding.name for encoding in ENCODINGS}


@pytest.mark.parametrize("encode", [made.fp8_block, made.fp8_channel, made.mxfp8], ids=["fp8", "fp8c", "mxfp8"])
def test_every_code_of_8_bits(encode, tmp_path):
    """Each of the 254 that are numbers, in each place of a line."""
    shape = Shape(1, 1, 512, 256)
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    tensors, dtypes, _ = made.make_layer_tensors(encode, shape)
    suffix = next(name.rsplit(".", 1)[1] for name in tensors if "scale" in name)
    for name in [name for name in tensors if name.endswith("weight")]:
        n, k = np.indices(tensors[name].shape)
        tensors[name] = codes[(n * 37 + k) % len(codes)]
        scale = tensors[f"{name.removesuffix('weight')}{suffix}"]
        scale[...] = 127 if scale.dtype == np.uint8 else 1
    write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    encoding = find(TensorFiles(tmp_path), "model.layers.7.mlp.experts.0.up_proj")
    layer = make_layer(shape, METHODS[encoding.method])
    load_layer(layer, encoding.method, tmp_path, 7)
    down = decoded(layer)[0][2]
    n, k = np.indices(down.shape)
    assert np.array_equal(down, made.E4M3[codes[(n * 37 + k) % len(codes)]])


@pytest.mark.parametrize("pad", range(4))
def test_data_may_start_at_any_byte_and_lie_in_several_files(pad, tmp_path):
    for number, encode in enumerate((made.gptq, made.rawint4, made.fp8_block)):
        tensors, dtypes, meaning = made.make_layer_tensors(encode, RAGGED)
        folder = tmp_path / str(number)
        for part in (0, 1):
            chosen = {name: tensor for place, (name, tensor) in enumerate(tensors.items()) if place % 2 == part}
            write_safetensors(folder / f"{part}.safetensors", chosen, dtypes=dtypes, pad=pad)
        encoding = find(TensorFiles(folder), "model.layers.7.mlp.experts.0.up_proj")
        found = choose_format(encoding.method, folder, 7, RAGGED.hidden, RAGGED.intermediate)
        layer = make_layer(RAGGED, *found[:1], (1,), found.group)
        load_layer(layer, encoding.method, folder, 7)
        assert_kept(layer, meaning)


def test_scales_of_f32_that_a_narrower_type_holds(tmp_path):
    """RAWINT4 takes f32 as bf16 or f16, whichever is exact."""
    for bits, expected in ((8, "rawint4"), (11, "int4z")):
        tensors, dtypes, _ = made.make_layer_tensors(partial(made.rawint4, dtype="F32"), PLAIN)
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            mantissa, exponent = np.frexp(tensors[name])
            tensors[name] = np.ldexp(np.floor(mantissa * 2**bits) / 2**bits, exponent).astype(np.float32)
        write_safetensors(tmp_path / str(bits) / "model.safetensors", tensors, dtypes=dtypes)
        found = choose_format("RAWINT4", tmp_path / str(bits), 7, PLAIN.hidden, PLAIN.intermediate)
        assert found == (expected, 32)
        kept, exact = make_layer(PLAIN, expected, group=32), make_layer(PLAIN, "bf16")
        load_layer(kept, "RAWINT4", tmp_path / str(bits), 7)
        load_layer(exact, "BF16", tmp_path / str(bits), 7)
        for left, right in zip(decoded(kept), decoded(exact), strict=True):
            for one, two in zip(left, right, strict=True):
                np.testing.assert_allclose(one, two, rtol=2**-8)


def test_a_map_and_a_second_load(tmp_path):
    _, meaning = write(tmp_path, made.mxfp4, PLAIN)
    layer = make_layer(PLAIN, "mxfp4")
    load_layer(layer, "MXFP4", tmp_path, 7, [2, 0, 0], skip=[False, True, False])
    assert layer.loaded_experts == 2
    load_layer(layer, "MXFP4", tmp_path, 7, [2, 0, 1])
    assert_kept(layer, [meaning[2], meaning[0], meaning[1]])


def load_nothing(folder, error: type, message: str) -> None:
    """The last expert is the bad one, and headers tell: nothing is loaded before it."""
    layer = make_layer(PLAIN, "fp8")
    with pytest.raises(error, match=message):
        load_layer(layer, "FP8", folder, 7)
    assert layer.loaded_experts == 0


def test_what_headers_tell_is_told_before_anything_is_loaded(tmp_path):
    name = "model.layers.7.mlp.experts.2.down_proj.weight"
    tensors, dtypes, _ = made.make_layer_tensors(made.fp8_block, PLAIN)
    file = write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    load_nothing(tmp_path, ValueError, r"down_proj\.weight_scale_inv' lies at bytes .* cut short")
    file.write_bytes(whole)
    places = {tensor: "absent.safetensors" if tensor == name else file.name for tensor in tensors}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    load_nothing(tmp_path, FileNotFoundError, rf"absent\.safetensors is missing; .* holds '{name}'")
    index.unlink()
    for changed, error, message in (
        (tensors[name].view(np.int8)[:, :8].copy(), ValueError, rf"{name}' is in no known encoding: .*I8 \[256, 8\]"),
        (tensors[name][:8].copy(), ValueError, rf"{name}' is F8_E4M3 \[8, 384\]; needed is \[256, 384\]"),
        (None, MissingTensorError, rf"no tensor '{name}'"),
    ):
        others = {tensor: array for tensor, array in tensors.items() if tensor != name}
        kinds = dtypes if changed is None or changed.dtype == np.uint8 else dtypes | {name: "I8"}
        write_safetensors(file, others | ({} if changed is None else {name: changed}), dtypes=kinds)
        load_nothing(tmp_path, error, message)
