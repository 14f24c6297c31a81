"""Original checkpoints: every way their tensors are named, typed and spread over files."""

import json

import numpy as np
import pytest
from layer_reference import Shape, from_bf16, to_bf16
from weight_files import (
    METHODS,
    as_loaded,
    checkpoint_tensors,
    decoded,
    make_layer,
    originals,
    same,
    write_safetensors,
)

from kt_kernel.weights import MissingTensorError, load_layer, save_layer

SHAPE = Shape(experts=3, top_k=2, hidden=72, intermediate=130)
BASES = ["model.layers.7", "language_model.model.layers.7", "model.language_model.layers.7", "layers.7"]
NAMINGS = ["separate", "mixtral", "packed"]


def load(path, weight_format="bf16", layer_idx=7, shape=SHAPE, **options):
    layer = make_layer(shape, weight_format)
    load_layer(layer, METHODS[weight_format], path, layer_idx, **options)
    return decoded(layer)


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("base", BASES)
def test_experts_are_found_under_every_name(base, naming, tmp_path):
    experts = originals(SHAPE)
    noise = {"model.layers.70.mlp.experts.0.gate_proj.weight": np.zeros((2, 2), np.float32)}
    write_safetensors(tmp_path / "model.safetensors", noise | checkpoint_tensors(experts, base, naming))
    assert same(load(tmp_path), as_loaded(SHAPE, "bf16", experts))


@pytest.mark.parametrize("weight_format", METHODS)
def test_a_checkpoint_is_quantised_for_methods_that_quantise(weight_format, tmp_path):
    experts = originals(SHAPE)
    path = write_safetensors(tmp_path / "one.safetensors", checkpoint_tensors(experts, BASES[0], "separate"))
    assert same(load(path, weight_format), as_loaded(SHAPE, weight_format, experts))


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_floats_are_rounded_to_bf16(dtype, naming, tmp_path):
    rng = np.random.default_rng(0)
    sizes = ((130, 72), (130, 72), (72, 130))
    experts = [tuple(rng.standard_normal(size).astype(dtype) for size in sizes) for _ in range(3)]
    experts[1][0][0, :2] = np.nan, np.inf
    rounded = [tuple(to_bf16(matrix) for matrix in expert) for expert in experts]
    write_safetensors(tmp_path / "model.safetensors", checkpoint_tensors(experts, BASES[0], naming))
    loaded = load(tmp_path)
    for got, expected in zip(loaded, rounded, strict=True):
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, from_bf16(b))


@pytest.mark.parametrize("pad", range(4))
def test_data_may_start_at_any_byte(pad, tmp_path):
    experts = originals(SHAPE)
    write_safetensors(tmp_path / "model.safetensors", checkpoint_tensors(experts, BASES[0], "separate"), pad=pad)
    assert same(load(tmp_path), as_loaded(SHAPE, "bf16", experts))


def split(folder, experts, indexed: bool) -> None:
    tensors = checkpoint_tensors(experts, BASES[0], "separate")
    files = {name: f"model-{number % 4 + 1:05d}-of-00004.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        write_safetensors(folder / file, {name: tensors[name] for name in tensors if files[name] == file})
    if indexed:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("indexed", [False, True])
def test_tensors_are_spread_over_files(indexed, tmp_path):
    experts = originals(SHAPE)
    split(tmp_path, experts, indexed)
    assert same(load(tmp_path), as_loaded(SHAPE, "bf16", experts))


def test_an_index_decides_which_files_are_read(tmp_path):
    split(tmp_path, originals(SHAPE), indexed=True)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not looked at")
    load(tmp_path)


def test_a_file_that_changes_is_read_again(tmp_path):
    first, second = originals(SHAPE), originals(SHAPE, seed=1)
    path = tmp_path / "model.safetensors"
    for experts in (first, second):
        write_safetensors(path, checkpoint_tensors(experts, BASES[0], "separate"), pad=experts is second)
        assert same(load(tmp_path), as_loaded(SHAPE, "bf16", experts))


def test_a_missing_file_of_the_index(tmp_path):
    split(tmp_path, originals(SHAPE), indexed=True)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002.* is missing; .*holds 'model\.layers\.7.*Download"):
        load(tmp_path)


def test_an_index_that_lies(tmp_path):
    split(tmp_path, originals(SHAPE), indexed=True)
    write_safetensors(tmp_path / "model-00002-of-00004.safetensors", {"other": np.zeros(3, np.float32)})
    with pytest.raises(MissingTensorError, match=r"model-00002.* has no tensor 'model\.layers\.7.*though"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON is damaged"),
        ("[]", "not an object"),
        ("{}", "weight_map must map tensors to files"),
        ('{"weight_map": {"a": 3}}', "weight_map must map tensors to files"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "no file of this folder"),
        ("[" * 100000, "JSON is damaged"),
    ],
)
def test_a_damaged_index(text, message, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"weight_path .*/absent does not exist"):
        load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors; is it the folder of the model"):
        load(tmp_path)


def test_a_layer_without_experts(tmp_path):
    tensors = checkpoint_tensors(originals(SHAPE), BASES[0], "separate")
    tensors |= checkpoint_tensors(originals(SHAPE), "model.layers.9", "packed")
    write_safetensors(tmp_path / "model.safetensors", tensors)
    message = (
        r"no experts of layer 0 under a known name such as 'model\.layers\.0\.mlp.*has experts of the layers 7\.\.9"
    )
    with pytest.raises(MissingTensorError, match=message):
        load(tmp_path, layer_idx=0)
    write_safetensors(tmp_path / "model.safetensors", {"lm_head.weight": np.zeros(2, np.float32)})
    with pytest.raises(KeyError, match="no tensors of experts"):
        load(tmp_path, layer_idx=0)


def test_a_tensor_that_is_missing_of_another_shape_or_type(tmp_path):
    good = checkpoint_tensors(originals(SHAPE), BASES[0], "separate")
    name = "model.layers.7.mlp.experts.1.up_proj.weight"
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {key: value for key, value in good.items() if key != name})
    with pytest.raises(MissingTensorError, match=f"has no tensor '{name}'; is the download"):
        load(tmp_path)
    write_safetensors(path, good | {name: good[name][:-1]})
    with pytest.raises(
        ValueError, match=rf"model\.safetensors: tensor '{name}' is BF16 \[129, 72\]; needed is .*\[130, 72\]"
    ):
        load(tmp_path)
    write_safetensors(path, good | {name: good[name].view(np.int8)[:, ::2].copy()})
    with pytest.raises(ValueError, match=rf"'{name}' is I8 \[130, 72\]; needed is BF16 or F16 or F32"):
        load(tmp_path)


# Sizes where one of the two tensors alone could be read either way.
@pytest.mark.parametrize("sizes", [(72, 130), (64, 64), (128, 64), (64, 128)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("pad", [0, 1])
def test_packed_experts_of_either_orientation(pad, turned, sizes, tmp_path):
    shape = Shape(3, 2, *sizes)
    experts = originals(shape)
    packed = checkpoint_tensors(experts, BASES[0], "packed")
    if turned:
        packed = {name: array.transpose(0, 2, 1).copy() for name, array in packed.items()}
    write_safetensors(tmp_path / "model.safetensors", packed, pad=pad)
    assert same(load(tmp_path, shape=shape), as_loaded(shape, "bf16", experts))
    layer = make_layer(shape, "int8")
    save_layer(layer.pool, "AMXINT8", tmp_path, 7, tmp_path / "out")
    assert same(load(tmp_path / "out", "int8", shape=shape), as_loaded(shape, "int8", experts))


def test_packed_experts_of_other_sizes(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", checkpoint_tensors(originals(SHAPE), BASES[0], "packed"))
    with pytest.raises(ValueError, match=r"gate_up_proj' is BF16 \[3, 260, 72\]; needed is .* \[3, 256, 72\]"):
        load(tmp_path, shape=Shape(3, 2, 72, 128))


@pytest.mark.parametrize("naming", NAMINGS)
def test_another_number_of_experts(naming, tmp_path):
    write_safetensors(tmp_path / "model.safetensors", checkpoint_tensors(originals(SHAPE), BASES[0], naming))
    with pytest.raises(ValueError, match=r"\(layer 7\) has 3 experts; this layer was made for 2"):
        load(tmp_path, shape=Shape(2, 1, 72, 130))
    with pytest.raises(ValueError, match=r"physical_to_logical_map\[3\] is 3; .* has 3 experts, 0\.\.2"):
        load(tmp_path, shape=Shape(4, 1, 72, 130))


def test_a_tensor_in_two_files(tmp_path):
    for name in ("a", "b"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"same": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match=r"tensor 'same' is both in .*a\.safetensors and in .*b\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("weight_format", ["int8", "int4", "int4g"])
def test_a_checkpoint_is_converted_without_a_layer(weight_format, naming, tmp_path):
    experts = originals(SHAPE)
    write_safetensors(tmp_path / "in" / "model.safetensors", checkpoint_tensors(experts, BASES[1], naming))
    layer = make_layer(SHAPE, weight_format)
    made = save_layer(layer.pool, METHODS[weight_format], tmp_path / "in", 7, tmp_path / "out")
    assert made == tmp_path / "out" / "layer-00007.safetensors"
    assert same(load(tmp_path / "out", weight_format), as_loaded(SHAPE, weight_format, experts))


def test_a_checkpoint_that_cannot_be_converted(tmp_path):
    pool = make_layer(SHAPE, "int8").pool
    write_safetensors(tmp_path / "model.safetensors", checkpoint_tensors(originals(SHAPE), BASES[0], "separate"))
    with pytest.raises(ValueError, match="BF16 keeps weights as they are"):
        save_layer(pool, "BF16", tmp_path, 7, tmp_path / "out")
    flat = {"model.layers.7.mlp.experts.0.gate_proj.weight": np.zeros(4, np.uint16)}
    flat["model.layers.7.mlp.experts.0.down_proj.weight"] = np.zeros(4, np.uint16)
    write_safetensors(tmp_path / "model.safetensors", flat)
    with pytest.raises(ValueError, match=r"down_proj.weight' has shape \[4\]; it must be a matrix"):
        save_layer(pool, "AMXINT8", tmp_path, 7, tmp_path / "out")
