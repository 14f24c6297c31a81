"""A file of the store that is cut short, damaged or somebody else's is never used, and is made again."""

import contextlib
import json
import os
import shutil
import warnings

import hypothesis
import hypothesis.strategies as st
import pytest
from store_cases import LAYER, SHAPE, StoreCase
from weight_files import decoded, make_layer, same

from kt_kernel.weights import store
from kt_kernel.weights.store import StoredLayer
from kt_kernel.weights.tensor_files import TensorFiles

BODY = 2 << 20  # where the body of these files begins
NODES = (1, 1)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A store with one file, two nodes."""
    case = StoreCase(tmp_path_factory.mktemp("kept"), "int8", NODES)
    case.load()
    case.size = case.file.stat().st_size
    case.region = case.size - 2 * BODY  # bytes of the second node; its region begins 2 MB after the body
    return case


@pytest.fixture
def case(kept, tmp_path):
    """The same, to be damaged."""
    folder = tmp_path / "case"
    shutil.copytree(kept.model.parent, folder, copy_function=shutil.copy2)
    case = StoreCase.__new__(StoreCase)
    case.__dict__ = kept.__dict__ | {
        "model": folder / kept.model.name,
        "source": folder / kept.model.name / kept.source.name,
        "store": folder / "store",
        "file": folder / "store" / kept.file.name,
    }
    return case


def flip(path, at: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def assert_noticed(case, match: str) -> None:
    with pytest.warns(RuntimeWarning, match=match) as caught:
        case.assert_made_again()
    assert len(caught) == 1
    assert str(caught[0].message).startswith(f"weight store: {case.file} is not used and will be made again: ")


def test_an_untouched_copy_is_used(case):
    case.spoil()
    assert case.is_from_store(case.load())


CUTS = [0, 1, 7, 8, 23, 31, 32, 33, 500, BODY - 1, BODY, BODY + 1, 2 * BODY, 2 * BODY + 64, -4096, -1]


@pytest.mark.parametrize("cut", CUTS)
def test_a_file_that_is_cut_short(cut, case):
    os.truncate(case.file, cut if cut >= 0 else case.size + cut)
    assert_noticed(case, "kt-kernel did not write it|cut short|checksum of its header|bytes, not")


def test_a_file_with_something_behind_it(case):
    with open(case.file, "ab") as file:
        file.write(b"\0")
    assert_noticed(case, "bytes, not")


def test_a_file_that_lost_its_data(case):
    """As a file system may leave it after a power cut: the size is right and the bytes are 0."""
    os.truncate(case.file, BODY)
    os.truncate(case.file, case.size)
    assert_noticed(case, "damaged: the checksum of its expert 0 is wrong")


@pytest.mark.parametrize("at", [0, 5, 24, 31, 32, 40, 100, 400])
def test_a_flipped_bit_in_the_header(at, case):
    flip(case.file, at, at % 8)
    assert_noticed(case, "kt-kernel did not write it|checksum of its header|cut short")


@pytest.mark.parametrize("at", range(16, 24))
def test_a_header_of_another_length(at, case):
    flip(case.file, at)
    assert_noticed(case, "cut short|checksum of its header")


@pytest.mark.parametrize("at", [BODY, BODY + 1000, 2 * BODY - (1 << 20), 2 * BODY, 2 * BODY + 5000, -1])
def test_a_flipped_bit_in_the_body(at, case):
    at = at if at >= 0 else case.size + at
    padding = BODY + case.region <= at < 2 * BODY
    flip(case.file, at, 7)
    if padding:  # between two nodes: nobody reads it
        case.spoil()
        assert case.is_from_store(case.load())
    else:
        assert_noticed(case, r"damaged: the checksum of its expert \d is wrong")


def test_two_experts_that_changed_places(case):
    expert = case.region // SHAPE.experts
    with open(case.file, "r+b") as file:
        file.seek(2 * BODY)
        one, two = file.read(expert), file.read(expert)
        file.seek(2 * BODY)
        file.write(two + one)
    assert_noticed(case, "checksum of its expert 0 is wrong")


@pytest.mark.parametrize("content", [b"", b"hello\n", bytes(100), b"\x89PNG\r\n\x1a\n" + bytes(5000)])
def test_a_file_of_somebody_else(content, case):
    case.file.write_bytes(content)
    assert_noticed(case, "kt-kernel did not write it")


def test_the_file_of_another_layer(case):
    """Sound, but made for something else: no warning."""
    data = case.file.read_bytes()
    case.load(threads=(1,))
    other = case.file.read_bytes()
    case.file.write_bytes(data)
    case.assert_made_again(threads=(1,))
    case.file.write_bytes(other)
    case.assert_made_again()


@pytest.mark.parametrize("version", [0, 1, 2**63])
def test_another_layout_version(version, case):
    with open(case.file, "r+b") as file:
        file.seek(8)
        file.write(version.to_bytes(8, "little"))
    case.assert_made_again()


def test_a_pipe_is_not_waited_for(case):
    case.file.unlink()
    os.mkfifo(case.file)
    assert_noticed(case, "it is no file")


def test_a_folder_in_the_place_of_the_file(case):
    case.file.unlink()
    case.file.mkdir()
    case.spoil()
    with pytest.warns(RuntimeWarning, match="weight store: ") as caught:
        assert not case.is_from_store(case.load())
    texts = [str(warning.message) for warning in caught]
    assert any("it is no file" in text for text in texts)
    assert any("cannot write packed weights: Is a directory" in text for text in texts)
    assert case.names() == [case.file.name]


def test_a_file_that_may_not_be_read(case, monkeypatch):
    opened = os.open

    def refuse(path, flags, *rest):
        if path == case.file and not flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)  # tests may run as root, whom no mode stops
    with pytest.warns(RuntimeWarning, match=r"cannot read .*ktpack: Permission denied; the weights are loaded from"):
        case.load()


def test_a_file_that_is_cut_while_it_is_read(case, monkeypatch):
    monkeypatch.setattr(store, "_BATCH", 1)
    case.spoil()
    seen = []

    def cut(*step):
        seen.append(step)
        if len(seen) == 2:
            os.truncate(case.file, BODY + 100)

    with pytest.warns(RuntimeWarning, match="is cut short"):
        layer = case.load(progress=cut)
    assert not case.is_from_store(layer)
    assert seen[:3] == [(1, 4), (2, 4), (1, 4)]


def test_a_source_that_is_gone_too_leaves_no_half_read_experts(case):
    flip(case.file, 2 * BODY)
    layer = make_layer(SHAPE, "int8", NODES)
    with TensorFiles(case.model) as files, pytest.warns(RuntimeWarning, match="damaged"):
        assert not StoredLayer(case.store, layer, case.model, LAYER, files, SHAPE.experts).read({0: [0], 3: [3]})
    assert layer.loaded_experts == 0


def read(case, path) -> bool:
    """Whether the file was used; then it must have given the right weights."""
    layer = make_layer(SHAPE, "int8", NODES)
    with TensorFiles(case.model) as files, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        stored = StoredLayer(path.parent, layer, case.model, LAYER, files, SHAPE.experts)
        used = stored.read({expert: [expert] for expert in range(SHAPE.experts)})
    assert layer.loaded_experts == (SHAPE.experts if used else 0)
    return used and same(decoded(layer), case.fresh)


@contextlib.contextmanager
def with_head(kept, head: bytes):
    """The kept file with other bytes at its beginning."""
    with open(kept.file, "r+b") as file:
        before = file.read(len(head))
        try:
            file.seek(0)
            file.write(head)
            file.flush()
            yield
        finally:
            file.seek(0)
            file.write(before)


def head_of(kept) -> bytes:
    data = kept.file.read_bytes()
    return data[: 32 + int.from_bytes(data[16:24], "little")]


def says(kept, text: bytes):
    start = head_of(kept)[:16] + len(text).to_bytes(8, "little")
    return with_head(kept, start + store._digest(start, text) + text)


@hypothesis.given(data=st.data())
def test_any_damage_to_the_header_is_noticed(kept, data):
    whole = head_of(kept)
    head = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(head) - 1))
        head[at] = data.draw(st.integers(0, 255))
    hypothesis.assume(head != whole)
    with with_head(kept, bytes(head)):
        assert not read(kept, kept.file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@hypothesis.given(data=st.data())
def test_a_header_that_says_something_else_is_refused(kept, data):
    """With a checksum that fits, as only a defective program would write it."""
    fields = json.loads(head_of(kept)[32:])
    name = data.draw(st.sampled_from(sorted(fields)))
    value = data.draw(JSON)
    hypothesis.assume(value != fields[name])
    fields[name] = value
    with says(kept, json.dumps(fields).encode()):
        assert not read(kept, kept.file)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b"{}", b"null", b'{"shape": ' + b"9" * 5000 + b"}"]
)
def test_a_header_that_is_no_object(text, kept):
    with says(kept, text):
        assert not read(kept, kept.file)


@pytest.mark.parametrize("rows", [None, [], [[1, 1, 1]] * 3, [[1, 1]] * 4, [[1, 0, 1]] * 4, [[1, True, 1]] * 4])
def test_a_wrong_list_of_rows_that_share_a_scale(rows, kept):
    with says(kept, json.dumps(json.loads(head_of(kept)[32:]) | {"scale_rows": rows}).encode()):
        assert not read(kept, kept.file)


@pytest.mark.parametrize("experts", [[], [0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [0, 1, 2, -1], [False, True, 2, 3]])
def test_a_wrong_list_of_experts(experts, kept):
    with says(kept, json.dumps(json.loads(head_of(kept)[32:]) | {"experts": experts}).encode()):
        assert not read(kept, kept.file)
