"""A conversion that was killed, damaged or repeated: what is right is kept, the rest is made again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from convert_cases import LAYERS, SHAPE, contents, manifest, run, write_model
from layer_reference import Shape

from kt_kernel.convert import ConvertError

MANY = Shape(experts=24, top_k=2, hidden=512, intermediate=768)

CONVERT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from convert_cases import run
run(Path(sys.argv[1]), Path(sys.argv[2]), "int4g", threads=1)
"""


def start(source, output):
    here = os.path.dirname(__file__)
    return subprocess.Popen([sys.executable, "-c", CONVERT, str(source), str(output), here], stderr=subprocess.PIPE)


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_killed_in_the_middle_of_a_layer_and_run_again(tmp_path):
    """kill -9 while the third layer is half written."""
    source = write_model(tmp_path / "model", layers=range(5), shape=MANY)
    out = tmp_path / "out"
    half = out / "layer-00002.safetensors.tmp"
    with start(source, out) as process:
        wait_for(lambda: half.exists() and "1" in manifest(out)["layers"], process)
        process.send_signal(signal.SIGKILL)
    assert half.exists()
    assert not (out / "layer-00002.safetensors").exists()
    assert not manifest(out)["complete"]
    kept = {layer: (out / f"layer-0000{layer}.safetensors").stat() for layer in (0, 1)}

    outcome, watcher = run(source, out, "int4g")
    assert (outcome.kept, outcome.converted) == ([0, 1], [2, 3, 4])
    assert watcher.begun == [("checking what is there", 48), ("converting", 72)]
    for layer, before in kept.items():
        after = (out / f"layer-0000{layer}.safetensors").stat()
        assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert manifest(out)["complete"]
    run(source, tmp_path / "whole", "int4g")
    assert contents(out) == contents(tmp_path / "whole")


def test_killed_before_the_manifest_has_the_layer(tmp_path):
    source = write_model(tmp_path / "model")
    run(source, tmp_path / "whole")
    out = tmp_path / "out"
    run(source, out)
    said = manifest(out) | {"complete": False}
    del said["layers"]["2"]
    (out / "kt-conversion.json").write_text(json.dumps(said))
    outcome, _ = run(source, out)
    assert (outcome.kept, outcome.converted) == ([1, 4], [2])
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["a bit", "cut short", "gone"])
def test_damaged_layers_are_made_again(damage, tmp_path):
    source = write_model(tmp_path / "model")
    out = tmp_path / "out"
    run(source, out)
    before = contents(out)
    path = out / "layer-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(data if damage == "a bit" else data[:-1])
    outcome, watcher = run(source, out)
    assert (outcome.kept, outcome.converted) == ([1, 4], [2])
    assert "layer-00002.safetensors is missing or damaged: it is made again" in watcher.notes
    assert contents(out) == before


def test_a_finished_conversion_is_only_checked(tmp_path):
    source = write_model(tmp_path / "model")
    first, _ = run(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    outcome, watcher = run(source, tmp_path / "out")
    assert (outcome.kept, outcome.converted) == (list(LAYERS), [])
    assert outcome.quality == first.quality
    assert watcher.layers == []
    assert contents(tmp_path / "out") == before


def test_resume_layer_leaves_those_below_alone(tmp_path):
    source = write_model(tmp_path / "model")
    outcome, watcher = run(source, tmp_path / "out", first_layer=2)
    assert (outcome.converted, outcome.missing) == ([2, 4], [1])
    assert "layers 1, below layer 2, are left out and not there" in watcher.notes
    assert not manifest(tmp_path / "out")["complete"]
    outcome, _ = run(source, tmp_path / "out")
    assert (outcome.kept, outcome.converted, outcome.missing) == ([2, 4], [1], [])
    run(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_layers_of_another_layout_are_not_mixed_in(tmp_path):
    """As of int4g with a step for every 32 weights."""
    source, out = write_model(tmp_path / "model"), tmp_path / "out"
    run(source, out, "int4g")
    said = (out / "kt-conversion.json").read_text()
    (out / "kt-conversion.json").write_text(said.replace('"layout_version": "2"', '"layout_version": "1"'))
    with pytest.raises(ConvertError, match=r'another layout_version \("1", now "2"\); choose another folder'):
        run(source, out, "int4g")


def test_another_method_or_source_is_not_mixed_in(tmp_path):
    source = write_model(tmp_path / "model")
    out = tmp_path / "out"
    run(source, out)
    before = contents(out)
    for quant_method, search, field in (("int4", True, "method"), ("int8", False, "scales")):
        with pytest.raises(ConvertError, match=rf"another {field} \(.*, now .*\); choose another folder, or pass --"):
            run(source, out, quant_method, search=search)
    os.utime(source / "model-2.safetensors")
    with pytest.raises(ConvertError, match="holds a conversion with another source_files"):
        run(source, out)
    assert contents(out) == before
    (out / "layer-00009.safetensors").write_bytes(b"of a larger model")
    outcome, _ = run(source, out, "int4", overwrite=True)
    assert outcome.converted == list(LAYERS)
    run(source, tmp_path / "fresh", "int4")
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_damaged_manifest_is_named(tmp_path):
    source = write_model(tmp_path / "model")
    run(source, tmp_path / "out")
    (tmp_path / "out" / "kt-conversion.json").write_text("{")
    with pytest.raises(ConvertError, match=r"kt-conversion\.json.* damaged .* pass --overwrite"):
        run(source, tmp_path / "out")


def test_two_conversions_do_not_share_a_folder(tmp_path):
    source = write_model(tmp_path / "model", layers=range(2), shape=MANY)
    out = tmp_path / "out"
    with start(source, out) as process:
        wait_for(lambda: (out / "layer-00000.safetensors.tmp").exists(), process)
        with pytest.raises(ConvertError, match="another process converts into this folder; wait for it"):
            run(source, out, "int4g")
        assert process.wait() == 0
    assert manifest(out)["complete"]


def test_an_interrupt_keeps_what_is_finished(tmp_path):
    source = write_model(tmp_path / "model")
    seen = []

    def interrupt(self, count):
        seen.append(count)
        if len(seen) == SHAPE.experts + 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convert_cases.Watcher.advance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out", threads=1)
    assert sorted(manifest(tmp_path / "out")["layers"]) == ["1"]
    assert not list((tmp_path / "out").glob("*.tmp"))
    outcome, _ = run(source, tmp_path / "out")
    assert outcome.kept == [1]
