"""Damaged safetensors are errors that name the file and the tensor, whatever the damage."""

import contextlib
import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from layer_reference import Shape
from weight_files import METHODS, checkpoint_tensors, make_layer, originals, write_safetensors

from kt_kernel.weights import load_layer, save_layer
from kt_kernel.weights.tensor_files import TensorFiles, read_header

SHAPE = Shape(experts=2, top_k=1, hidden=16, intermediate=10)


def write(path, header: object, data: bytes = b"", length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": tensor("F33")}, "'a' has the unknown dtype 'F33'"),
        ({"a": tensor(["F32"])}, "'a' has the unknown dtype"),
        ({"a": tensor(shape=[-2])}, "'a' has a shape or data_offsets that are no sizes"),
        ({"a": tensor(shape=[True])}, "'a' has a shape or data_offsets that are no sizes"),
        ({"a": tensor(shape=[2.0])}, "'a' has a shape or data_offsets that are no sizes"),
        ({"a": tensor(shape=2)}, "'a' has a shape or data_offsets that are no sizes"),
        ({"a": tensor(offsets=[0])}, "'a' has a shape or data_offsets that are no sizes"),
        ({"a": tensor(offsets=[8, 0])}, r"'a' lies at bytes"),
        ({"a": tensor(offsets=[8, 16])}, r"'a' lies at bytes .* the file is cut short or damaged"),
        ({"a": tensor(offsets=[0, 10**30])}, r"'a' lies at bytes"),
        ({"a": tensor(shape=[3])}, r"'a' is F32 \[3\], but the file gives it 8 bytes"),
        ({"a": tensor(shape=[10**12, 10**12])}, "but the file gives it 8 bytes"),
        ({"a": 5}, "'a' has no dtype, shape and data_offsets"),
        ({"a": tensor(), "b": tensor("U8", [2], [6, 8])}, "tensors 'a' and 'b' overlap"),
        ({"__metadata__": 5}, "__metadata__ must map strings to strings"),
        ({"__metadata__": {"a": 5}}, "__metadata__ must map strings to strings"),
        ([], "not an object"),
        (b"{", "JSON is damaged"),
        (b"\xff\xfe\xfd", "JSON is damaged"),
        (b'{"a": 1, "a": 2}', "a name occurs twice"),
        (b"[" * 200_000, "JSON is damaged"),
        (b'{"a": ' + b"9" * 5000 + b"}", "JSON is damaged"),
    ],
)
def test_a_damaged_header_says_where(header, message, tmp_path):
    path = write(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match=message) as caught:
        TensorFiles(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x02", bytes(8), b"\xff" * 8, b"\xff" * 100, b"\x03" + bytes(7) + b"{}"])
def test_what_is_no_safetensors_file(content, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"no safetensors file, or is cut short|JSON is damaged") as caught:
        TensorFiles(path)
    assert str(path) in str(caught.value)


def test_empty_tensors_and_every_type_are_fine(tmp_path):
    header = {
        "empty": tensor("F64", [0, 3], [4, 4]),
        "half": tensor("F4", [8], [0, 4]),
        "scalar": tensor("BF16", [], [4, 6]),
        "byte": tensor("F8_E4M3", [2], [6, 8]),
    }
    files = TensorFiles(write(tmp_path / "model.safetensors", header, bytes(range(8))))
    assert files.array("empty", ["F64"], (0, 3)).shape == (0, 3)
    assert files.array("scalar", ["BF16"], ()) == 0x0504
    assert list(files.array("byte", ["F8_E4M3"], (2,))) == [6, 7]


def test_the_reference_reader_agrees(tmp_path):
    """In both directions: it reads what we write, we read what it writes."""
    numpy_files = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    source = write_safetensors(
        tmp_path / "in.safetensors", checkpoint_tensors(originals(SHAPE), "model.layers.0", "separate")
    )
    made = save_layer(make_layer(SHAPE, "int4g").pool, "INT4G", source, 0, tmp_path / "out")
    theirs = numpy_files.load_file(made)
    header = read_header(made)
    assert theirs.keys() == header.tensors.keys()
    files = TensorFiles(made)
    for name, array in theirs.items():
        entry = header.tensors[name]
        assert np.array_equal(files.array(name, [entry.dtype], entry.shape), array)
        assert entry.dtype != "F32" or entry.begin % 4 == 0
    again = tmp_path / "again.safetensors"
    numpy_files.save_file(theirs, again, metadata=header.metadata)
    layer = make_layer(SHAPE, "int4g")
    load_layer(layer, "INT4G", again, 0)


@pytest.fixture(scope="module")
def valid_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("valid")
    tensors = checkpoint_tensors(originals(SHAPE), "model.layers.0", "separate")
    source = write_safetensors(folder / "bf16.safetensors", tensors)
    files = {"bf16": source.read_bytes()}
    for weight_format in ("int8", "int4g"):
        made = save_layer(
            make_layer(SHAPE, weight_format).pool, METHODS[weight_format], source, 0, folder / weight_format
        )
        files[weight_format] = made.read_bytes()
    return files, folder


@hypothesis.given(data=st.data())
def test_no_damage_gets_further_than_an_error(valid_files, data):
    """The header is most of these files, and most mutations go there."""
    files, folder = valid_files
    weight_format = data.draw(st.sampled_from(sorted(files)))
    content = bytearray(files[weight_format])
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["set", "cut", "insert", "digit", "append"]))
        at = data.draw(st.integers(0, min(header_end, max(len(content) - 1, 0))))
        if kind == "set" and at < len(content):
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del content[data.draw(st.integers(0, len(content))) :]
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(max_size=9))
        elif kind == "append":
            content += data.draw(st.binary(max_size=9))
        else:
            digits = [i for i in range(8, min(header_end, len(content))) if chr(content[i]).isdigit()]
            if digits:
                content[data.draw(st.sampled_from(digits))] = ord(str(data.draw(st.integers(0, 9))))
    path = folder / f"damaged-{hash(bytes(content))}.safetensors"  # headers are remembered by name, size and time
    path.write_bytes(content)
    with contextlib.suppress(ValueError, OSError, KeyError):
        load_layer(make_layer(SHAPE, weight_format), METHODS[weight_format], path, 0)
    path.unlink()
