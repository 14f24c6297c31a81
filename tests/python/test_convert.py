"""Conversion of whole models: what comes out is what load_expert would pack, loads everywhere, and says what it is."""

import json
import subprocess

import encoded_weights as made
import numpy as np
import pytest
from convert_cases import LAYERS, SHAPE, config, contents, manifest, run, write_model
from layer_reference import from_bf16, to_bf16
from weight_files import METHODS, ReleasedLayer, as_loaded, decoded, make_layer, originals, same, write_safetensors

from kt_kernel.convert import ConvertError, folder
from kt_kernel.convert.engine import QUANT_METHODS
from kt_kernel.methods import format_of
from kt_kernel.weights import find_method, load_layer

FILES = ["SHA256SUMS", "config.json", "kt-conversion.json", "kt-quality.json", "model.safetensors.index.json"]


def load(path, layer_idx, weight_format, threads=(1,)):
    layer = make_layer(SHAPE, weight_format, threads)
    load_layer(layer, METHODS[weight_format], path, layer_idx)
    return decoded(layer)


@pytest.mark.parametrize("quant_method", QUANT_METHODS)
def test_layers_hold_what_a_load_would_pack(quant_method, tmp_path):
    source = write_model(tmp_path / "model")
    outcome, watcher = run(source, tmp_path / "out", quant_method, search=False, threads=3)
    assert outcome[:4] == (QUANT_METHODS[quant_method], list(LAYERS), [], [])
    assert watcher.layers == list(LAYERS)
    assert watcher.begun == [("converting", 12)]
    assert watcher.advanced == 12
    weight_format = format_of(outcome.method)
    for layer in LAYERS:
        expected = as_loaded(SHAPE, weight_format, originals(SHAPE, seed=layer))
        for threads in ((1,), (1, 1), (1, 1, 1)):
            assert same(load(tmp_path / "out", layer, weight_format, threads), expected)
    names = [f"layer-{layer:05d}.safetensors" for layer in LAYERS]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted([*FILES, *names])


def test_the_number_of_threads_changes_nothing(tmp_path):
    source = write_model(tmp_path / "model")
    for threads in (1, 2, 7):
        run(source, tmp_path / str(threads), "int4g", threads=threads)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "7")


def test_what_the_folder_says_about_itself(tmp_path):
    source = write_model(tmp_path / "model")
    (source / "tokenizer.json").write_text("{}")
    run(source, tmp_path / "out", "int4g")
    said = manifest(tmp_path / "out")
    assert (said["method"], said["format"], said["scales"]) == ("INT4G", "int4g", "searched")
    assert (said["layout_version"], said["input_type"], said["complete"]) == ("2", "bf16", True)
    assert said["source"] == str(source)
    assert set(said["source_files"]) == {f"model-{layer}.safetensors" for layer in LAYERS}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["blk.4.ffn_down_exps.3.steps"] == "layer-00004.safetensors"
    assert len(index["weight_map"]) == 3 * 4 * 9
    sizes = [(tmp_path / "out" / record["file"]).stat().st_size for record in said["layers"].values()]
    assert sizes == [record["bytes"] for record in said["layers"].values()]
    assert 0 < index["metadata"]["total_size"] < sum(sizes)
    check = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "out", capture_output=True, text=True)
    assert check.returncode == 0
    assert check.stdout.count(": OK") == 3
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert find_method(tmp_path / "out", 2, SHAPE.hidden, SHAPE.intermediate) == "INT4G"


@pytest.mark.parametrize("quant_method", ["int8", "int4", "int4g"])
def test_the_report_gives_the_errors_of_the_weights(quant_method, tmp_path):
    source = write_model(tmp_path / "model")
    largest, _ = run(source, tmp_path / "largest", quant_method, search=False)
    searched, _ = run(source, tmp_path / "searched", quant_method, search=True)
    weight_format = format_of(QUANT_METHODS[quant_method])
    for outcome, path in ((largest, "largest"), (searched, "searched")):
        report = json.loads((tmp_path / path / "kt-quality.json").read_text())
        assert report == outcome.quality
        assert report["scales"] == path
        tensors = {}
        for layer in LAYERS:
            found = load(tmp_path / path, layer, weight_format)
            for expert, (matrices, converted) in enumerate(zip(originals(SHAPE, seed=layer), found, strict=True)):
                for projection, bits, values in zip(("gate", "up", "down"), matrices, converted, strict=True):
                    exact = from_bf16(bits).astype(np.float64)
                    tensors[layer, projection, expert] = ((exact - values) ** 2).sum(), (exact**2).sum()
        for layer in LAYERS:
            sums = np.sum([value for key, value in tensors.items() if key[:2] == (layer, "up")], axis=0)
            assert report["layers"][str(layer)]["up"] == pytest.approx(np.sqrt(sums[0] / sums[1]), rel=1e-3)
        sums = np.sum(list(tensors.values()), axis=0)
        assert report["error"]["all"] == pytest.approx(np.sqrt(sums[0] / sums[1]), rel=1e-3)
        worst = max(tensors, key=lambda key: tensors[key][0] / tensors[key][1])
        assert tuple(report["worst"][0][key] for key in ("layer", "projection", "expert")) == worst
        assert len(report["worst"]) == 10
    most = {"int8": 1.02, "int4": 0.95, "int4g": 1.02}[quant_method]  # a search makes another error least
    assert searched.quality["error"]["all"] < most * largest.quality["error"]["all"]


ENCODED = {
    "fp8": made.fp8_block,
    "awq": made.awq,
    "gptq": made.gptq,
    "mxfp4": made.mxfp4,
    "rawint4": made.rawint4,
}


@pytest.mark.parametrize("input_type", ENCODED)
def test_quantised_checkpoints(input_type, tmp_path):
    shape = type(SHAPE)(experts=2, top_k=1, hidden=128, intermediate=256)
    tensors, dtypes, meaning = made.make_layer_tensors(ENCODED[input_type], shape)
    write_safetensors(tmp_path / "model" / "model.safetensors", tensors, dtypes=dtypes)
    outcome, watcher = run(tmp_path / "model", tmp_path / "out", "int8", search=False, input_type="bf16")
    assert f"stored as {input_type}" in watcher.notes[0]
    assert watcher.notes[1] == f"input type bf16 was asked for; what is stored, {input_type}, decides"
    assert outcome.converted == [7]
    layer = make_layer(shape, "int8")
    load_layer(layer, "AMXINT8", tmp_path / "out", 7)
    exact = [[to_bf16(made.nearest_bf16(matrix)) for matrix in matrices] for matrices in meaning]
    assert same(decoded(layer), as_loaded(shape, "int8", exact))


@pytest.mark.parametrize("naming", ["mixtral", "packed"])
def test_other_names(naming, tmp_path):
    source = write_model(tmp_path / "model", naming=naming)
    run(source, tmp_path / "out", "int8", search=False)
    assert same(load(tmp_path / "out", 4, "int8"), as_loaded(SHAPE, "int8", originals(SHAPE, seed=4)))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    source = write_model(tmp_path / "model", num_hidden_layers=4)
    outcome, watcher = run(source, tmp_path / "out")
    assert outcome.converted == [1, 2]
    assert any("layers 4 have experts, but config.json does not count them" in note for note in watcher.notes)


def test_one_file_without_a_config(tmp_path):
    source = write_model(tmp_path / "model", layers=(0,))
    (source / "config.json").unlink()
    outcome, _ = run(source / "model-0.safetensors", tmp_path / "out")
    assert outcome.converted == [0]
    assert not (tmp_path / "out" / "config.json").exists()


class TestRefused:
    def test_methods(self, tmp_path):
        with pytest.raises(ConvertError, match="'awq' is unknown; the methods are int4, int8, int4g, moe_int4"):
            run(tmp_path, tmp_path / "out", "awq")

    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            run(tmp_path / "nowhere", tmp_path / "out")

    def test_a_model_without_experts(self, tmp_path):
        dense = {"model.layers.0.mlp.up_proj.weight": np.zeros((2, 2), np.uint16)}
        write_safetensors(tmp_path / "model" / "model.safetensors", dense)
        with pytest.raises(ConvertError, match="has no experts under a known name; is it a Mixture-of-Experts"):
            run(tmp_path / "model", tmp_path / "out")

    def test_weights_that_are_converted(self, tmp_path):
        run(write_model(tmp_path / "model"), tmp_path / "out")
        with pytest.raises(ConvertError, match="holds weights that kt-kernel converted; convert the original model"):
            run(tmp_path / "out", tmp_path / "again")
        released = ReleasedLayer(type(SHAPE)(2, 1, 128, 256), "int8", 1)
        released.write_merged(tmp_path / "merged" / "model.safetensors", 0)
        released.write_tree(tmp_path / "tree", 0)
        for name in ("merged", "tree"):
            with pytest.raises(ConvertError, match="convert the original model"):
                run(tmp_path / name, tmp_path / "again")
        (tmp_path / "gguf").mkdir()
        (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
        with pytest.raises(ConvertError, match="is GGUF, which is quantised for the CPU already"):
            run(tmp_path / "gguf", tmp_path / "again")
        assert not (tmp_path / "again").exists()

    def test_experts_that_are_missing(self, tmp_path):
        source = write_model(tmp_path / "model")
        (source / "config.json").write_text(json.dumps(config(num_experts=5)))
        with pytest.raises(ConvertError, match=r"layer 1 has experts 0\.\.3, but config\.json says that there are 5"):
            run(source, tmp_path / "out")
        (source / "config.json").unlink()
        tensors = write_model(tmp_path / "fewer", layers=(2,), shape=type(SHAPE)(3, 2, 96, 160))
        (tensors / "model-2.safetensors").replace(source / "model-2.safetensors")
        with pytest.raises(ConvertError, match=r"layer 2 has experts 0\.\.2, layer 1 has 0\.\.3"):
            run(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_files_that_are_missing_or_cut_short_show_before_anything_is_written(self, tmp_path):
        source = write_model(tmp_path / "model")
        names = {
            f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight": f"model-{layer}.safetensors"
            for layer in LAYERS
            for expert in range(SHAPE.experts)
            for matrix in ("gate", "up", "down")
        }
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        whole = (source / "model-4.safetensors").read_bytes()
        (source / "model-4.safetensors").write_bytes(whole[:-100])
        with pytest.raises(ValueError, match=r"model-4\.safetensors.*cut short"):
            run(source, tmp_path / "out")
        (source / "model-4.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"model-4\.safetensors is missing"):
            run(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_weights_that_are_no_numbers(self, tmp_path):
        source = write_model(tmp_path / "model", layers=(1,))
        experts = originals(SHAPE, seed=2)
        experts[3][2][5, 7] = 0x7FC0
        named = {f"model.layers.2.mlp.experts.{e}.{p}_proj.weight": m for e, ms in enumerate(experts)
                 for p, m in zip(("gate", "up", "down"), ms, strict=True)}  # fmt: skip
        write_safetensors(source / "model-2.safetensors", named)
        with pytest.raises(ValueError, match=r"\(layer 2\): down of expert 3 has weights that are NaN"):
            run(source, tmp_path / "out")
        assert sorted(manifest(tmp_path / "out")["layers"]) == ["1"]
        assert not list((tmp_path / "out").glob("*.tmp"))

    def test_a_disk_that_is_too_small(self, tmp_path, monkeypatch):
        source = write_model(tmp_path / "model")
        usage = folder.shutil.disk_usage(tmp_path)._replace(free=10_000)
        monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ConvertError, match=r"the layers need 0\.000\d+ GB, and the disk has 1e-05 GB free; free"):
            run(source, tmp_path / "out")
        assert not any((tmp_path / "out").iterdir())

    def test_the_folder_of_the_source(self, tmp_path):
        source = write_model(tmp_path / "model")
        with pytest.raises(ConvertError, match="is the folder of the source"):
            run(source, tmp_path / "out" / ".." / "model")

    def test_a_folder_with_other_files(self, tmp_path):
        source = write_model(tmp_path / "model")
        other = write_model(tmp_path / "out", layers=(9,))
        before = contents(other)
        with pytest.raises(ConvertError, match=r"holds model-9\.safetensors and no kt-conversion\.json"):
            run(source, other)
        assert contents(other) == before
        blocked = tmp_path / "file"
        blocked.write_text("")
        with pytest.raises(ConvertError, match=r"cannot write to .*file: .*; choose a folder that you may write to"):
            run(source, blocked)
