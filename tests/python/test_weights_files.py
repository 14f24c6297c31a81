"""Converted files of our own: what is saved is what is loaded, and nothing half-written ever has their name."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from layer_reference import Shape
from weight_files import METHODS, as_loaded, decoded, make_layer, originals, same, write_safetensors

from kt_kernel.weights import load_layer, load_layer_from_tensors, writer
from kt_kernel.weights.experts import Sizes
from kt_kernel.weights.tensor_files import TensorFiles, read_header
from kt_kernel.weights.tensor_writer import TensorSpec, TensorWriter

SHAPE = Shape(experts=3, top_k=2, hidden=99, intermediate=261)
CODED = ["int8", "int4", "int4g"]
NODES = [(1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)]


def stacked(experts) -> list[np.ndarray]:
    return [np.stack(matrices) for matrices in zip(*experts, strict=True)]


def save(folder, weight_format="int8", layer_idx=2, threads=(1,), experts=None, **options):
    layer = make_layer(SHAPE, weight_format, threads)
    experts = stacked(experts or originals(SHAPE))
    path = load_layer_from_tensors(
        layer, METHODS[weight_format], *experts, save_to=folder, layer_idx=layer_idx, **options
    )
    return layer, path


@pytest.mark.parametrize("threads", NODES)
@pytest.mark.parametrize("weight_format", CODED)
def test_saved_on_any_number_of_nodes_and_loaded_on_any(weight_format, threads, tmp_path):
    expected = as_loaded(SHAPE, weight_format, originals(SHAPE))
    layer, path = save(tmp_path / "new" / "folder", weight_format, threads=threads)
    assert path == tmp_path / "new" / "folder" / "layer-00002.safetensors"
    assert same(decoded(layer), expected)
    for nodes in NODES:
        again = make_layer(SHAPE, weight_format, nodes)
        load_layer(again, METHODS[weight_format], path.parent, 2)
        assert same(decoded(again), expected)


def test_a_file_says_what_it_is(tmp_path):
    _, path = save(tmp_path, "int4g")
    header = read_header(path)
    assert header.metadata == {"format": "int4g", "layout_version": "2"}
    name = "blk.2.ffn_{}_exps.{}.{}".format
    assert header.tensors[name("gate", 0, "weight")][:2] == ("U8", (261, 50))
    assert header.tensors[name("down", 2, "weight")][:2] == ("U8", (99, 131))
    assert header.tensors[name("down", 2, "steps")][:2] == ("U8", (99, 5))
    assert header.tensors[name("up", 1, "scale")][:2] == ("F32", (261,))
    assert len(header.tensors) == 27


def test_files_are_in_logical_order_whatever_the_map(tmp_path):
    mapped, path = save(tmp_path / "a", physical_to_logical=[2, 0, 1], skip=[False, True, False])
    _, plain = save(tmp_path / "b")
    assert path.read_bytes() == plain.read_bytes()
    expected = as_loaded(SHAPE, "int8", originals(SHAPE))
    assert same(decoded(mapped)[::2], [expected[2], expected[1]])
    assert not decoded(mapped)[1][0].any()


def test_layers_are_files_of_one_folder(tmp_path):
    for layer_idx in (0, 2):
        save(tmp_path, layer_idx=layer_idx, experts=originals(SHAPE, seed=layer_idx))
    (tmp_path / "layer-00000.safetensors").chmod(0o644)
    layer = make_layer(SHAPE, "int8")
    load_layer(layer, "AMXINT8", tmp_path, 2)
    assert same(decoded(layer), as_loaded(SHAPE, "int8", originals(SHAPE, seed=2)))
    with pytest.raises(KeyError, match=r"no experts of layer 1 .* it has experts of the layers 0\.\.2"):
        load_layer(layer, "AMXINT8", tmp_path, 1)


@pytest.mark.parametrize("found", CODED)
@pytest.mark.parametrize("wanted", METHODS)
def test_another_method_is_named(found, wanted, tmp_path):
    save(tmp_path, found)
    if found == wanted:
        return
    message = (
        rf"layer-00002.* for method {METHODS[found]} \({found}\).*method {METHODS[wanted]} .*method='{METHODS[found]}'"
    )
    with pytest.raises(ValueError, match=message):
        load_layer(make_layer(SHAPE, wanted), METHODS[wanted], tmp_path, 2)


def test_another_model_or_version_is_noticed(tmp_path):
    _, path = save(tmp_path)
    other = make_layer(Shape(3, 2, 99, 260), "int8")
    with pytest.raises(
        ValueError, match=r"'blk\.2\.ffn_gate_exps\.0\.weight' is I8 \[261, 99\]; needed is I8 \[260, 99\]"
    ):
        load_layer(other, "AMXINT8", tmp_path, 2)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"layout_version":"1"', b'"layout_version":"7"'))
    with pytest.raises(ValueError, match=r"has layout version '7' of int8, this kt-kernel reads '1'"):
        load_layer(make_layer(SHAPE, "int8"), "AMXINT8", tmp_path, 2)
    name = "blk.2.ffn_gate_exps.0.weight"
    write_safetensors(path, {name: np.zeros((261, 99), np.int8)})
    with pytest.raises(ValueError, match="another program wrote it; convert the original"):
        load_layer(make_layer(SHAPE, "int8"), "AMXINT8", tmp_path, 2)


def test_int4g_with_a_step_for_every_32_weights_is_refused(tmp_path):
    _, path = save(tmp_path, "int4g")
    path.write_bytes(path.read_bytes().replace(b'"layout_version":"2"', b'"layout_version":"1"'))
    with pytest.raises(ValueError, match=r"has layout version '1' of int4g, this .* reads '2': convert the weights"):
        load_layer(make_layer(SHAPE, "int4g"), "INT4G", tmp_path, 2)


def interrupt_at(position: int):
    def progress(done: int, _total: int) -> None:
        if done == position:
            raise KeyboardInterrupt

    return progress


def test_an_interrupted_write_leaves_nothing_and_harms_nothing(tmp_path):
    _, path = save(tmp_path)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, experts=originals(SHAPE, seed=1), progress=interrupt_at(2))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_write_that_lacks_an_expert_is_no_file(tmp_path):
    with (
        pytest.raises(ValueError, match="expert 0 was not written"),
        writer.LayerWriter(tmp_path, 0, "int8", 2, Sizes(64, 64)),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_other_sizes_or_none_are_no_file(tmp_path):
    specs = {"a": TensorSpec("BF16", (2, 3)), "b": TensorSpec("F32", (4,))}
    path = tmp_path / "model.safetensors"

    def writer() -> TensorWriter:
        return TensorWriter(path, specs, {"format": "pt"}, "a model", "model.safetensors.tmp")

    with pytest.raises(ValueError, match=r"a is float32 \[2, 3\], not BF16 \[2, 3\]"), writer() as file:
        file.write("a", np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="tensor 'b' was not written"), writer() as file:
        file.write("a", np.zeros((2, 3), np.uint16))
    assert list(tmp_path.iterdir()) == []
    with writer() as file:
        file.write("b", np.arange(4, dtype=np.float32))
        file.write("a", np.arange(6, dtype=np.uint16).reshape(2, 3))
    with TensorFiles(path) as files:
        assert files.array("a", ["BF16"], (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert files.array("b", ["F32"], (4,)).tolist() == [0, 1, 2, 3]
        assert files.metadata_of("a") == {"format": "pt"}


KILLED = """
import sys, time
from pathlib import Path
from kt_kernel.weights.experts import Sizes
from kt_kernel.weights.writer import LayerWriter
with LayerWriter(Path(sys.argv[1]), 4, "int8", 2, Sizes(64, 64)):
    print("open", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"open\n"
        leftover = tmp_path / "layer-00004.safetensors.tmp"
        save(tmp_path, layer_idx=2)
        assert leftover.exists()  # its writer is alive
        with pytest.raises(OSError, match="another process writes this file; wait for it"):
            save(tmp_path, layer_idx=4)
        process.send_signal(signal.SIGKILL)
    assert leftover.exists()
    assert not (tmp_path / "layer-00004.safetensors").exists()
    save(tmp_path, layer_idx=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["layer-00002.safetensors"]


def test_two_writers_of_one_layer_make_one_whole_file(tmp_path):
    """Each either writes the file or is told to wait."""
    results = []

    def run(seed: int) -> None:
        try:
            save(tmp_path, experts=originals(SHAPE, seed=seed))
            results.append("written")
        except OSError as error:
            results.append(error.errno)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) <= {"written", errno.EBUSY}
    assert "written" in results
    layer = make_layer(SHAPE, "int8")
    load_layer(layer, "AMXINT8", tmp_path, 2)
    assert any(same(decoded(layer), as_loaded(SHAPE, "int8", originals(SHAPE, seed=seed))) for seed in range(4))


@pytest.mark.parametrize("where", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk_says_how_much_is_needed(where, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, where, full)
    with pytest.raises(OSError, match=r"cannot write converted weights: No space.*needs .* GB; free some") as caught:
        save(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_cannot_reserve_is_fine(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    _, path = save(tmp_path)
    load_layer(make_layer(SHAPE, "int8"), "AMXINT8", path, 2)


def test_a_folder_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match="cannot write converted weights: ") as caught:
        save(blocked)
    assert str(blocked) in str(caught.value)


def test_a_folder_without_permission_says_so(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)  # tests may run as root, whom no mode stops
    with pytest.raises(PermissionError, match="Permission denied; choose a folder that you may write to"):
        save(tmp_path)


def test_the_header_is_plain_json_and_data_is_aligned(tmp_path):
    _, path = save(tmp_path, "int4g")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 64 == 0
    ends = [value["data_offsets"] for key, value in json.loads(data[8 : 8 + length]).items() if key != "__metadata__"]
    assert [begin for begin, _ in sorted(ends)] == [0, *[end for _, end in sorted(ends)][:-1]]  # no holes
    assert max(end for _, end in ends) == len(data) - 8 - length
