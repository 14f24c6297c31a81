"""`kt model`: what is told about models of every kind, the list of names, folders, and checks of files."""

import hashlib
import json

import pytest
import yaml
from cli_cases import run
from convert_cases import SHAPE, config, write_model
from convert_cases import run as convert
from gguf_cases import Experts, write_gguf
from layer_reference import Shape
from weight_files import ReleasedLayer

from kt_kernel import folders, settings
from kt_kernel.registry import user_models
from kt_kernel.registry.contents import contents

FIELDS = {"expert_count": SHAPE.experts, "expert_used_count": SHAPE.top_k, "block_count": 5}


@pytest.fixture
def kt(home, capfd, monkeypatch):
    monkeypatch.chdir(home)
    return lambda *arguments: run(capfd, "model", *arguments)


@pytest.fixture
def models(home):
    """The folder in which kt looks for models."""
    return folders.data_folder() / "models"


def gguf_model(path, **options):
    fields = {f"qwen3moe.{name}": value for name, value in FIELDS.items()}
    return write_gguf(path, Experts(SHAPE, ("q4_0", "q4_0", "q8_0")).tensors(), fields=fields, **options)


def dense_model(folder):
    import numpy as np
    from weight_files import write_safetensors

    write_safetensors(folder / "model.safetensors", {"model.norm.weight": np.zeros(8, np.uint16)})
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1}')
    return folder


def with_index(folder):
    """As the hub has it."""
    from kt_kernel.weights.tensor_files import INDEX, read_header

    files = {name: file.name for file in folder.glob("*.safetensors") for name in read_header(file).tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def test_what_a_checkpoint_is(tmp_path):
    found = contents(write_model(tmp_path / "model"))
    assert (found.format, found.files, found.model_type, found.method) == ("safetensors", 3, "qwen3_moe", "BF16")
    assert (found.experts, found.top_k, found.hidden, found.is_moe) == (SHAPE.experts, SHAPE.top_k, SHAPE.hidden, True)
    assert found.bytes == sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert (found.complete, found.problem) == (True, None)


def test_what_a_converted_folder_is(tmp_path):
    convert(write_model(tmp_path / "model"), tmp_path / "out", "int4g")
    found = contents(tmp_path / "out")
    assert (found.format, found.method, found.experts, found.complete) == ("converted", "INT4G", SHAPE.experts, True)
    manifest = tmp_path / "out" / "kt-conversion.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "complete": False}))
    assert not contents(tmp_path / "out").complete


@pytest.mark.parametrize("form", ["merged", "tree"])
def test_what_earlier_versions_converted_is_told(tmp_path, form):
    shape = Shape(experts=2, top_k=1, hidden=128, intermediate=64)
    layer = ReleasedLayer(shape, "int8", parts=1)
    if form == "merged":
        layer.write_merged(tmp_path / "model.safetensors", 1)
    else:
        layer.write_tree(tmp_path, 1)
    assert contents(tmp_path).format == "converted"
    (tmp_path / "config.json").write_text(json.dumps(config(shape, layers=2, first_k_dense_replace=1)))
    found = contents(tmp_path)
    assert (found.format, found.experts, found.method) == ("converted", 2, "AMXINT8")


def test_what_a_gguf_file_is(tmp_path):
    file = gguf_model(tmp_path / "m.gguf")
    for path in (file, tmp_path):
        found = contents(path)
        assert (found.format, found.files, found.method, found.stored_as) == ("gguf", 1, "LLAMAFILE", "Q4_0, Q8_0")
        assert (found.model_type, found.experts, found.layers) == ("qwen3moe", SHAPE.experts, 5)


def test_what_is_no_moe_model_or_damaged_is_told(tmp_path):
    found = contents(dense_model(tmp_path / "dense"))
    assert (found.is_moe, found.model_type, found.problem) == (False, "llama", None)
    folder = with_index(write_model(tmp_path / "model"))
    (folder / "model-4.safetensors").unlink()
    assert not contents(folder).complete
    (folder / "config.json").write_text("{")
    assert "config.json" in contents(folder).problem


def test_add_list_info_remove(kt, tmp_path):
    folder = write_model(tmp_path / "Thing-1B")
    assert kt("add", folder, "--name", "mine", "--repo", "org/Thing").out == f"mine is {folder}\n"
    listed = kt("list", "--json").json()["models"]
    assert [(row["name"], row["path"], row["moe"], row["method"]) for row in listed] == [
        ("mine", str(folder), True, "BF16")
    ]
    entry = yaml.safe_load(user_models.path().read_text())["models"][0]
    assert (entry["format"], entry["is_moe"], entry["moe_num_experts"]) == ("safetensors", True, SHAPE.experts)
    header, row = kt("list").out.splitlines()
    assert row.split() == ["mine", "safetensors", "4/2", "BF16", "0.0", "ok", str(folder)]
    assert header.split() == ["Name", "Format", "Experts", "Method", "GB", "State", "Path"]
    assert kt("list", "--no-moe", "--json").json() == {"models": []}
    assert kt("info", "MINE", "--json").json()["repo"] == "org/Thing"
    assert "4, 2 at a time" in kt("info", "mine").out
    assert kt("add", folder, "--name", "mine").code == 0  # the same again
    assert "a model is called 'mine' already" in kt("add", dense_model(tmp_path / "dense"), "-n", "mine").line()
    assert kt("remove", "mine").code == 0
    assert "no model was added as 'mine'" in kt("remove", "mine").line()
    assert (folder / "config.json").exists()


@pytest.mark.parametrize("path", ["nothing", "empty"])
def test_what_is_no_model_is_not_added(kt, home, path):
    (home / "empty").mkdir()
    said = kt("add", path)
    assert (said.code, user_models.user_models()) == (1, [])
    assert "give the folder of a model, or a GGUF file" in said.line()


def test_models_in_the_folders_are_listed_without_being_added(kt, models, home):
    dense_model(models / "dense")
    write_model(models / "org" / "moe")
    gguf_model(models / "ggufs" / "a.gguf")
    gguf_model(models / "ggufs" / "b.gguf")
    snapshot = home / ".cache/huggingface/hub/models--org--cached/snapshots/abc"
    dense_model(snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    rows = kt("list", "--json").json()["models"]
    assert {row["name"]: row["moe"] for row in rows} == {
        "dense": False,
        "a": True,
        "b": True,
        "moe": True,
        "cached": False,
    }
    assert [row["name"] for row in kt("list", "--moe", "--json").json()["models"]] == ["a", "b", "moe"]
    for name in [row["name"] for row in rows]:
        assert kt("info", name, "--json").json()["path"] == next(row["path"] for row in rows if row["name"] == name)


def test_a_model_that_is_gone_is_shown_as_such(kt, tmp_path):
    folder = write_model(tmp_path / "model")
    kt("add", folder)
    for file in folder.iterdir():
        file.unlink()
    assert kt("list", "--json").json()["models"][0]["state"] == "empty"
    folder.rmdir()
    assert kt("list", "--json").json()["models"][0]["state"] == "gone"
    assert "which is gone" in kt("info", "model").line()


def test_known_models(kt):
    said = kt("list", "--all", "--json").json()
    assert {"name": "MiniMax-M2", "experts": 256, "top_k": 8}.items() <= next(
        row.items() for row in said["known"] if row["name"] == "MiniMax-M2"
    )
    assert "no models in" in kt("list").line()
    assert "kt model download m2" in kt("info", "m2").out
    assert kt("info", "demo").code == 0
    assert "no model is called 'nothing-like-it'" in kt("info", "nothing-like-it").line()


def test_scan(kt, tmp_path, models):
    dense_model(tmp_path / "a" / "b" / "dense")
    write_model(tmp_path / "moe")
    (tmp_path / ".hidden").mkdir()
    dense_model(tmp_path / ".hidden" / "x")
    assert kt("scan", tmp_path, "--json").json() == {"models": [], "added": False}  # none has 2 GB
    found = kt("scan", tmp_path, "--min-size", 0, "--json").json()["models"]
    assert [row["name"] for row in found] == ["dense", "moe"]
    assert [
        row["name"] for row in kt("scan", tmp_path, "--min-size", 0, "--max-depth", 1, "--json").json()["models"]
    ] == ["moe"]
    assert kt("scan", tmp_path, "--min-size", 0, "--add").code == 0
    assert [model.name for model in user_models.user_models()] == ["dense", "moe"]
    assert "nothing new was found" in kt("scan", tmp_path, "--min-size", 0).line()
    dense_model(tmp_path / "other" / "moe")
    dense_model(tmp_path / "other" / "-my model (1)")
    kt("scan", tmp_path / "other", "--min-size", 0, "--add")
    assert user_models.get("moe-2").path == str(tmp_path / "other" / "moe")
    assert user_models.get("my-model-1-").path == str(tmp_path / "other" / "-my model (1)")
    assert "is no folder" in kt("scan", tmp_path / "nowhere").line()


def test_folders_of_models(kt, tmp_path, models):
    (tmp_path / "a, b").mkdir()
    assert kt("path-list").out == f"{models}\n"
    assert kt("path-add", tmp_path / "a, b").out.splitlines() == [str(models), str(tmp_path / "a, b")]
    assert kt("path-add", tmp_path, "--first").out.splitlines() == [str(tmp_path), str(models), str(tmp_path / "a, b")]
    assert kt("path-list", "--json").json() == {"paths": [str(tmp_path), str(models), str(tmp_path / "a, b")]}
    assert kt("path-remove", models).code == 0
    assert settings.get("paths.models") == [str(tmp_path), str(tmp_path / "a, b")]
    assert "is not on the list" in kt("path-remove", models).line()
    assert "is no folder" in kt("path-add", tmp_path / "nowhere").line()


def flip(file, at=-1):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_verify_by_the_checksums_of_a_conversion(kt, tmp_path):
    out = tmp_path / "out"
    convert(write_model(tmp_path / "model"), out, "int8")
    kt("add", out)
    said = kt("verify", "out")
    assert (said.code, said.out) == (0, "out: sound; 3 of 4 files by checksum\n")
    assert user_models.get("out").sha256_status == "passed"
    flip(out / "layer-00002.safetensors")
    said = kt("verify", "out", "--json")
    assert said.code == 1
    wrong = [check for check in said.json()["out"]["checks"] if not check["sound"]]
    assert [(check["file"], check["about"]) for check in wrong] == [
        ("layer-00002.safetensors", "has another checksum than kt-conversion.json says")
    ]
    assert user_models.get("out").sha256_status == "failed"
    assert kt("verify", "out", "--quick").code == 0
    (out / "layer-00001.safetensors").unlink()
    assert "layer-00001.safetensors: wrong: is missing" in kt("verify", "--all").out


def test_verify_by_headers_and_the_index(kt, tmp_path):
    folder = with_index(write_model(tmp_path / "model"))
    assert kt("verify", folder).out == "model: sound by headers and sizes; nobody left checksums\n"
    file = folder / "model-2.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    said = kt("verify", folder)
    assert said.code == 1
    assert "model-2.safetensors: wrong: " in said.out
    assert "cut short or damaged" in said.out
    file.write_bytes(data + b"x")
    assert "its tensors end at" in kt("verify", folder).out
    file.unlink()
    assert "names model-2.safetensors, which is missing" in kt("verify", folder).out


def test_verify_gguf_and_checksums_beside_it(kt, tmp_path):
    file = gguf_model(tmp_path / "m.gguf")
    assert kt("verify", file).code == kt("verify", tmp_path).code == 0
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(file.read_bytes()).hexdigest()} *m.gguf\n")
    assert "1 of 2 files by checksum" in kt("verify", tmp_path).out
    flip(file)
    assert "m.gguf: wrong: has another checksum than SHA256SUMS says" in kt("verify", tmp_path).out
    file.write_bytes(file.read_bytes()[:-100])
    assert kt("verify", file).code == 1


def test_verify_by_the_names_of_blobs_in_the_hubs_cache(kt, home):
    cache = home / ".cache/huggingface/hub/models--org--thing"
    snapshot = dense_model(cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    (cache / "blobs").mkdir()
    for file in list(snapshot.iterdir()):
        data = file.read_bytes()
        large = hashlib.sha256(data).hexdigest()
        small = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # as git has it
        blob = cache / "blobs" / (large if file.suffix == ".safetensors" else small)
        file.rename(blob)
        file.symlink_to(blob)
    assert kt("verify", "org/thing").out == "thing: sound; 2 of 2 files by checksum\n"
    flip(snapshot / "config.json")
    assert "config.json: wrong: has another checksum than the hub says" in kt("verify", "org/thing").out


@pytest.mark.parametrize("arguments", [(), ("x", "--all")])
def test_verify_needs_models_or_all(kt, arguments):
    said = kt("verify", *arguments)
    assert said.code == 2
    assert "name models, or give --all" in said.line()


def test_the_demo_model(kt, monkeypatch, tmp_path):
    from kt_kernel.demo import model as demo

    assert "the demo model is not here yet" in kt("verify", "demo").line()
    monkeypatch.setattr(demo, "usual_path", lambda: dense_model(tmp_path / "made"))
    assert "made" in kt("info", "demo").out
    said = kt("verify", "demo")
    assert (said.code, "kt-demo.json is missing" in said.out) == (1, True), said


def test_verify_what_is_not_here(kt):
    assert "MiniMax-M2 is not here: kt model download MiniMax-M2" in kt("verify", "m2").line()
