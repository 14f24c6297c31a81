"""Damaged GGUF files load, or are errors that name the file: whatever is damaged, and in bounded time."""

import struct
from datetime import timedelta

import hypothesis
import hypothesis.strategies as st
import pytest
from gguf_cases import LAYER, Experts, RecordingLayer, write_gguf
from layer_reference import Shape

from kt_kernel.weights import choose_traits, load_layer, model_config
from kt_kernel.weights.gguf_file import read_header

SHAPE = Shape(experts=2, top_k=1, hidden=32, intermediate=32)
KINDS = ("packed", "joined", "each")
FIELDS = {
    "qwen3moe.expert_count": 2,
    "qwen3moe.expert_used_count": 1,
    "qwen3moe.block_count": 4,
    "general.alignment": 32,
    "qwen3moe.swiglu_clamp_exp": [0.0, 0.0, 0.0, 0.0],
    "general.name": "some model",
    "tokenizer.ggml.tokens": ["a", "bc", "", "def"],
    "tokenizer.ggml.scores": [0.5, 1.5],
}

# What counts, lengths, sizes and offsets become; around the limits of what is checked, and of what C integers hold.
BOUNDARIES = sorted(
    {0, 1, 2, 3, 4, 5, 8, 9, 13, 24, 31, 32, 33, 255, 256, 4096, 4097, 2**20}
    | {2**bits + more for bits in (31, 32, 40, 60, 61, 62, 63) for more in (-1, 0, 1)}
    | {2**64 - 1, 2**64 - 8, 2**64 - 32}
)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Content and bytes of the header, by naming."""
    folder = tmp_path_factory.mktemp("fuzz")
    files = {}
    for naming in KINDS:
        path = write_gguf(folder / f"{naming}.gguf", Experts(SHAPE, "q4_0").tensors(naming), fields=FIELDS)
        files[naming] = path.read_bytes(), read_header(path).bytes
    return files, folder


def use(path) -> None:
    """Everything that looks at a file."""
    load_layer(RecordingLayer(SHAPE, "q4_0"), "LLAMAFILE", path, LAYER)
    model_config(path)
    choose_traits(str(path), LAYER, None, None, 0.0, 0.0)


def test_valid_files_load(valid):
    files, folder = valid
    for naming in files:
        use(folder / f"{naming}.gguf")


def mutate(draw, content: bytearray, header: int) -> None:
    kind = draw(st.sampled_from(["set", "flip", "u32", "u64", "u64", "cut", "insert", "delete", "repeat"]))
    end = min(header, len(content))
    if kind == "cut":
        del content[draw(st.integers(0, len(content))) :]
        return
    if end < 8:
        return
    at = draw(st.integers(0, end - 8))
    if kind == "set":
        content[at] = draw(st.integers(0, 255))
    elif kind == "flip":
        content[at] ^= 1 << draw(st.integers(0, 7))
    elif kind == "u32":
        content[at : at + 4] = struct.pack("<I", draw(st.sampled_from(BOUNDARIES)) % 2**32)
    elif kind == "u64":
        content[at : at + 8] = struct.pack("<Q", draw(st.sampled_from(BOUNDARIES)))
    elif kind == "insert":
        content[at:at] = draw(st.binary(max_size=16))
    elif kind == "delete":
        del content[at : at + draw(st.integers(1, 16))]
    else:
        content[at:at] = content[at : at + draw(st.integers(1, 64))]


def check(path, content: bytes) -> None:
    path.write_bytes(content)
    message = ""
    try:
        use(path)
    except (ValueError, OSError, KeyError) as error:
        message = str(error)
    path.unlink()
    assert not message or str(path.parent) in message, f"{message!r} does not name the file"


@hypothesis.settings(deadline=timedelta(seconds=5), max_examples=400)
@hypothesis.given(data=st.data())
def test_no_damage_gets_further_than_an_error(valid, data):
    files, folder = valid
    content, header = files[data.draw(st.sampled_from(KINDS))]
    content = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        mutate(data.draw, content, header)
    check(folder / f"damaged-{hash(bytes(content))}.gguf", bytes(content))  # headers are remembered by name and time


@pytest.mark.parametrize("naming", KINDS)
@pytest.mark.parametrize("value", [0, 2**20, 2**63 - 1, 2**64 - 1])
def test_every_place_of_the_header_with_a_boundary(value, naming, valid):
    """Whatever stands at a place, it is held against something."""
    files, folder = valid
    content, header = files[naming]
    for at in range(header - 8):
        damaged = bytearray(content)
        damaged[at : at + 8] = struct.pack("<Q", value)
        check(folder / f"boundary-{naming}-{value}-{at}.gguf", bytes(damaged))
