"""The packed-weight store: what it gives is what packing gives, to the bit, and only where nothing has changed."""

import hashlib
import json
import os

import numpy as np
import pytest
from layer_reference import Shape, random_expert, to_bf16
from store_cases import LAYER, SHAPE, StoreCase, forward
from weight_files import METHODS, ReleasedLayer, decoded, make_layer, same, write_safetensors

from kt_kernel import _core
from kt_kernel.weights import checkpoint, load_layer, store
from kt_kernel.weights.tensor_files import read_header

NODES = [(1,), (1, 1), (2, 1, 1)]


@pytest.mark.parametrize("threads", NODES)
@pytest.mark.parametrize("weight_format", METHODS)
def test_the_second_load_gives_the_same_bits(weight_format, threads, tmp_path):
    case = StoreCase(tmp_path, weight_format, threads)
    first = case.load()
    assert case.names() == [case.file.name]
    case.spoil()
    second = case.load()
    assert case.is_from_store(second)
    assert second.loaded_experts == SHAPE.experts
    assert np.array_equal(forward(first), forward(second))


def test_nothing_is_kept_unless_told(tmp_path):
    case = StoreCase(tmp_path)
    case.load(store=None)
    assert not case.store.exists()


def test_a_file_in_use_stays_as_it_is(tmp_path):
    case = StoreCase(tmp_path)
    case.load()
    before = os.stat(case.file)
    case.load()
    after = os.stat(case.file)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("weight_format", METHODS)
def test_another_map_is_served_from_the_same_file(weight_format, tmp_path):
    """Experts are kept by logical id."""
    case = StoreCase(tmp_path, weight_format)
    case.load(physical_to_logical=[2, 0, 3, 1])
    case.spoil()
    assert case.is_from_store(case.load())
    twice = decoded(case.load(physical_to_logical=[1, 1, 3, 1]))
    assert same(twice, [case.fresh[expert] for expert in (1, 1, 3, 1)])


def test_skipped_experts_are_not_in_the_file(tmp_path):
    case = StoreCase(tmp_path)
    case.load()
    full = case.file.stat().st_size
    case.file.unlink()
    case.load(skip=[True, False, False, True])
    part = case.file.stat().st_size
    expert = make_layer(SHAPE, "bf16").packed_bytes_per_expert
    assert full - part == 2 * expert
    case.spoil()
    layer = case.load(skip=[True, True, False, True])
    assert layer.loaded_experts == 1
    assert same(decoded(layer)[2:3], case.fresh[2:3])
    assert not case.is_from_store(case.load())  # it needs more than there is
    assert case.file.stat().st_size == full


def test_a_layer_whose_experts_are_all_skipped_is_no_file(tmp_path):
    case = StoreCase(tmp_path)
    case.load(skip=[True] * SHAPE.experts)
    assert not case.store.exists()


@pytest.mark.parametrize("kind", ["merged", "tree"])
def test_converted_weights_are_kept_too(kind, tmp_path):
    shape = Shape(experts=2, top_k=1, hidden=128, intermediate=128)
    released = ReleasedLayer(shape, "int8", parts=1)
    model = tmp_path / "model"
    files = (
        [released.write_merged(model / "model.safetensors", LAYER)]
        if kind == "merged"
        else sorted(released.write_tree(model, LAYER).rglob("*.kt"))
    )

    def load():
        layer = make_layer(shape, "int8")
        load_layer(layer, "AMXINT8", model, LAYER, store=tmp_path / "store")
        return decoded(layer)

    expected = load()
    for file in files:  # the last bytes of the file and of the tree are data
        status, data = os.stat(file), bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert same(load(), expected)
    os.utime(files[0])
    assert not same(load(), expected)


class TestStale:
    """Anything that may have changed the packed bytes makes the file again."""

    def test_a_source_with_another_time(self, tmp_path):
        case = StoreCase(tmp_path)
        case.load()
        status = os.stat(case.source)
        os.utime(case.source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        case.assert_made_again()

    def test_a_source_with_another_size(self, tmp_path):
        case = StoreCase(tmp_path)
        case.load()
        status = os.stat(case.source)
        with open(case.source, "ab") as file:
            file.write(b"\0\0")
        os.utime(case.source, ns=(status.st_atime_ns, status.st_mtime_ns))
        case.assert_made_again()

    def test_a_source_with_another_header(self, tmp_path):
        case = StoreCase(tmp_path)
        case.load()
        status, data = os.stat(case.source), case.source.read_bytes()
        for old, new in ((b".0.gate", b".0.????"), (b".1.gate", b".0.gate"), (b".0.????", b".1.gate")):
            data = data.replace(old, new)
        copy = case.model / "copy"  # another inode: the header of one is read once while size and time stay
        copy.write_bytes(data)
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        copy.rename(case.source)
        case.assert_made_again()

    def test_a_source_of_another_name(self, tmp_path):
        case = StoreCase(tmp_path)
        case.load()
        case.source = case.source.rename(case.model / "other.safetensors")
        case.assert_made_again()

    def test_another_split(self, tmp_path):
        case = StoreCase(tmp_path)
        case.load()
        case.assert_made_again(threads=(1, 1))

    def test_a_layer_with_more_columns(self, tmp_path):
        case = StoreCase(tmp_path)
        case.load()
        larger = Shape(SHAPE.experts, SHAPE.top_k, SHAPE.hidden, SHAPE.intermediate + 8)
        with pytest.raises(ValueError, match="needed is"):
            load_layer(make_layer(larger, "bf16"), "BF16", case.model, LAYER, store=case.store)

    @pytest.mark.parametrize("name", ["LAYOUT_VERSION", "_core"])
    def test_another_version(self, name, tmp_path, monkeypatch):
        case = StoreCase(tmp_path)
        case.load()
        other = 1 if name == "LAYOUT_VERSION" else OtherCore()
        with monkeypatch.context() as patched:
            patched.setattr(store, name, other)
            case.assert_made_again()
        case.assert_made_again()

    def test_the_reason_is_told_who_asks(self, tmp_path, monkeypatch, capfd):
        case = StoreCase(tmp_path)
        case.load()
        monkeypatch.setenv("KT_KERNEL_DEBUG", "1")
        case.load(threads=(1, 1))
        assert "is made again: parts was [[0, 0, 200, " in capfd.readouterr().err


class OtherCore:
    __version__ = "9.9"

    def __getattr__(self, name):
        return getattr(_core, name)


def test_formats_layers_and_models_have_files_of_their_own(tmp_path):
    case = StoreCase(tmp_path)
    for weight_format in METHODS:
        case.load(weight_format)
    other = case.model.rename(tmp_path / "other-model")
    case.load(path=other)
    case.load(path=other / "model.safetensors")
    names = [f"some-model.layer-00005.{weight_format}.ktpack" for weight_format in METHODS]
    others = [f"{model}.layer-00005.bf16.ktpack" for model in ("other-model", "model.safetensors")]
    assert case.names() == sorted(names + others)


def test_a_relative_path_is_named_after_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store.file_name(store.Path("."), 3, "int8") == f"{tmp_path.name}.layer-00003.int8.ktpack"


@pytest.mark.parametrize("base", checkpoint.BASES)
def test_every_way_to_name_layers_finds_its_files(base, tmp_path):
    """Only the files of this layer count: others may come and go."""
    expert = dict(zip(("w1", "w3", "w2"), random_expert(SHAPE, 0, 0), strict=True))
    for layer_idx in (1, 11):
        tensors = {f"{base.format(layer=layer_idx)}.experts.0.{name}.weight": array for name, array in expert.items()}
        write_safetensors(tmp_path / f"{layer_idx}.safetensors", tensors)
    with store.TensorFiles(tmp_path) as files:
        assert [name for name, *_ in store._sources(files, 1)] == ["1.safetensors"]


def test_a_source_that_changes_while_it_is_loaded_is_not_kept(tmp_path):
    case = StoreCase(tmp_path)
    case.load(progress=lambda *_: os.utime(case.source))
    assert not case.store.exists()


def test_a_file_of_the_source_that_is_gone_is_named_as_ever(tmp_path):
    case = StoreCase(tmp_path)
    tensors = read_header(case.source).tensors
    files = {name: "gone.safetensors" if ".3." in name else case.source.name for name in tensors}
    (case.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors is missing; model\.safetensors\.index\.json says"):
        case.load()
    assert not case.store.exists()


def test_progress_counts_experts(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_BATCH", 1)
    case, seen = StoreCase(tmp_path), []
    for _ in range(2):
        case.load(progress=lambda *step: seen.append(step))
    assert seen == 2 * [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    case = StoreCase(tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.WholeFile, "write_at", interrupt)
    with pytest.raises(KeyboardInterrupt):
        case.load()
    assert case.names() == []


# Of the packed bytes of one expert. Another digest means that files of other versions must not be used.
DIGESTS = {
    "bf16": "a00e4ef4163cf093",
    "int8": "6316b4caa7f13654",
    "int4": "f16b1d91c3e2caad",
    "int4g": "ad4bd81f252400f4",
}


def patterned(rows: int, depth: int) -> np.ndarray:
    """bf16 in -1..1; no generator whose stream may change."""
    steps = np.arange(rows * depth, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(1 << 32)
    return to_bf16((steps.astype(np.float64) / 2**31 - 1).astype(np.float32)).reshape(rows, depth)


@pytest.mark.parametrize("weight_format", DIGESTS)
def test_packed_bytes_change_only_with_the_layout_version(weight_format, tmp_path):
    layer, rows, depth = make_layer(SHAPE, weight_format), SHAPE.intermediate, SHAPE.hidden
    layer.load_expert(2, patterned(rows, depth), patterned(rows, depth), patterned(depth, rows))
    with open(tmp_path / "body", "w+b") as file:
        layer.write_packed(file.fileno(), "body", 0, 1, [(0, 2)])
        assert file.seek(0, os.SEEK_END) == layer.packed_bytes(1) == layer.packed_bytes_per_expert
        file.seek(0)
        digest = hashlib.sha256(file.read()).hexdigest()[:16]
    assert digest == DIGESTS[weight_format], "raise LAYOUT_VERSION in store.py, and write the new digest here"
    assert store.LAYOUT_VERSION == 3
