"""method="auto": what a folder holds decides."""

import numpy as np
import pytest
from layer_reference import Shape
from weight_files import ReleasedLayer, checkpoint_tensors, originals, write_safetensors
from wrapper_cases import assert_right, batch, make, tensors

from kt_kernel import KTMoEWrapper
from kt_kernel.weights import mapped_file

SHAPE = Shape(experts=3, top_k=2, hidden=128, intermediate=256)
BASE = "model.layers.7"


def auto(path, **options) -> KTMoEWrapper:
    return make(SHAPE, "auto", **{"layer_idx": 7, "weight_path": path, **options})


def check(path, method: str, **options) -> None:
    wrapper = auto(path, **options)
    assert wrapper.method == method
    wrapper.load_weights()
    tokens = batch(SHAPE, 5)
    assert_right(wrapper, wrapper.forward(*tokens), *tokens)


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
@pytest.mark.parametrize("naming", ["separate", "mixtral", "packed"])
def test_a_checkpoint(naming, dtype, tmp_path):
    experts = [[np.zeros_like(m, dtype) for m in expert] for expert in originals(SHAPE)]
    if dtype == np.uint16:
        experts = originals(SHAPE)
    write_safetensors(tmp_path / "model.safetensors", checkpoint_tensors(experts, BASE, naming))
    check(tmp_path, "BF16")
    check(tmp_path / "model.safetensors", "BF16")


@pytest.mark.parametrize("method", ["AMXINT8", "AMXINT4", "INT4G", "MOE_INT8"])
def test_what_we_converted(method, tmp_path):
    writer = make(SHAPE, method, layer_idx=7, weight_path=tmp_path, cpu_save=True)
    writer.load_weights_from_tensors(*tensors(SHAPE))
    (tmp_path / "layer-00009.safetensors").write_bytes(b"not looked at")
    check(tmp_path, method.replace("MOE_", "AMX"))


@pytest.mark.parametrize("form", ["merged", "tree"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("weight_format", "method"), [("int8", "AMXINT8"), ("int4", "AMXINT4")])
def test_what_others_converted(weight_format, method, parts, form, tmp_path):
    layer = ReleasedLayer(SHAPE, weight_format, parts)
    if form == "tree":
        layer.write_tree(tmp_path, 7)
    else:
        layer.write_merged(tmp_path / "model.safetensors", 7)
    wrapper = auto(tmp_path)
    assert wrapper.method == method
    if (weight_format, parts) != ("int4", 2):  # which needs a sub-pool for each part
        check(tmp_path, method)


def test_only_headers_are_read(tmp_path, monkeypatch):
    write_safetensors(tmp_path / "model.safetensors", checkpoint_tensors(originals(SHAPE), BASE, "packed"))
    monkeypatch.setattr(mapped_file, "MappedFile", None)
    assert auto(tmp_path).method == "BF16"


def refused(path, message: str, error: type = ValueError, **options) -> None:
    with pytest.raises(error, match=message):
        auto(path, **options)


def test_a_folder_is_needed(tmp_path):
    refused("", "method='auto' needs weight_path")
    refused(tmp_path / "absent", "absent does not exist", FileNotFoundError)
    refused(
        tmp_path,
        r"no \*\.safetensors, no \*\.gguf and no _layer_\* folders; it has nothing\. No method fits; the methods are",
    )
    (tmp_path / "model.onnx").write_bytes(b"")
    refused(tmp_path, r"it has \.onnx\. No method fits")
    (tmp_path / "model.gguf").write_bytes(b"")
    refused(tmp_path, r"model\.gguf is empty")


def test_weights_that_no_method_reads(tmp_path):
    path = tmp_path / "model.safetensors"
    good = checkpoint_tensors(originals(SHAPE), BASE, "separate")
    write_safetensors(path, {name: array.view(np.int8) for name, array in good.items()})
    refused(
        tmp_path, r"has 'model\.layers\.7\.mlp\.experts\.0\.gate_proj\.weight' in I8\. No method fits; the methods are"
    )
    write_safetensors(path, {f"{BASE}.mlp.experts.0.gate_proj.qweight": np.zeros((4, 4), np.int32)})
    refused(tmp_path, r"'.*qweight' is in no known encoding")
    write_safetensors(path, good)
    refused(tmp_path, "no experts of layer 0 under a known name; it has experts of the layers 7", layer_idx=0)
    blob = {"blk.7.ffn_gate_exps.0.numa.0.weight": np.zeros(100, np.int8)}
    write_safetensors(path, blob)
    refused(tmp_path, "has 100 bytes, which is neither int8 nor int4")


def test_a_converted_file_of_another_kind(tmp_path):
    codes = {"blk.7.ffn_gate_exps.0.weight": np.zeros((256, 128), np.int8)}
    write_safetensors(tmp_path / "layer-00007.safetensors", codes, {"format": "int3", "layout_version": "1"})
    refused(tmp_path, "has weights in int3. No method fits")


def test_a_tree_of_both_formats_or_of_other_layers(tmp_path):
    for weight_format in ("int4", "int8"):
        ReleasedLayer(SHAPE, weight_format, 1).write_tree(tmp_path, 7)
    refused(tmp_path, "has int4 and int8 of layer 7")
    refused(tmp_path, "has no weights of layer 3", layer_idx=3)
