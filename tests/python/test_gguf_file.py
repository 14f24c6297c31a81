"""Headers of GGUF files: as the package gguf reads them, and errors that name file and tensor for whatever is wrong."""

import struct
import time

import numpy as np
import pytest
from gguf_cases import ARRAY, STRING, TYPES, UINT32, Experts, field, gguf, raw_gguf, tensor, text, write_gguf
from layer_reference import Shape

from kt_kernel.ggml_types import EXPERT_TYPES, OTHER_TYPES
from kt_kernel.ggml_types import TYPES as ALL_TYPES
from kt_kernel.weights.gguf_file import PassedOver, read_field, read_header

SHAPE = Shape(experts=3, top_k=1, hidden=64, intermediate=96)
HUGE = 2**64 - 1


def test_the_table_of_types_is_that_of_the_package():
    theirs = {int(kind): (kind.name.lower(), *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {type_id: tuple(kind) for type_id, kind in ALL_TYPES.items()} == theirs
    assert not EXPERT_TYPES.keys() & OTHER_TYPES.keys()
    assert len(TYPES) == len(EXPERT_TYPES) == 25


def test_the_package_reads_the_same(tmp_path):
    fields = {"qwen3moe.expert_count": 3, "a.string": "ü", "a.float": 0.5, "per.layer": [1, 2, 3], "words": ["a", "b"]}
    others = {"norm.weight": np.arange(5, dtype=np.float32), "cube": np.ones((2, 3, 4, 5), np.float32)}
    experts = Experts(SHAPE, ("q4_0", "q5_1", "f16"))
    path = write_gguf(tmp_path / "model.gguf", experts.tensors() | others, fields=fields)
    header, theirs = read_header(path), gguf.GGUFReader(path)
    assert header.fields["qwen3moe.expert_count"] == 3
    assert header.fields["a.string"] == "ü"
    assert header.fields["a.float"] == 0.5
    assert header.fields["per.layer"] == [1, 2, 3]
    assert header.fields["words"] == PassedOver(2)
    assert header.tensors.keys() == {found.name for found in theirs.tensors}
    for found in theirs.tensors:
        mine = header.tensors[found.name]
        assert mine.type.name == found.tensor_type.name.lower()
        assert list(mine.shape) == list(found.shape)[::-1]
        assert (mine.begin, mine.end - mine.begin) == (found.data_offset, found.n_bytes)


def test_version_2_alignment_and_every_kind_of_field(tmp_path):
    kinds = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -5), 4: ("I", 2**32 - 1), 5: ("i", -7)}
    kinds |= {6: ("f", 0.5), 7: ("?", True), 10: ("Q", HUGE), 11: ("q", -9), 12: ("d", 1e300)}
    fields = [field(f"kind.{kind}", kind, struct.pack(f"<{code}", value)) for kind, (code, value) in kinds.items()]
    fields += [
        field(f"many.{kind}", ARRAY, struct.pack(f"<IQ2{code}", kind, 2, value, value))
        for kind, (code, value) in kinds.items()
    ]
    fields.append(field("general.alignment", UINT32, struct.pack("<I", 64)))
    tensors = [tensor("scalar", ()), tensor("empty", (0, 5), offset=64), tensor("last", (3,), offset=64)]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw_gguf(fields, tensors, bytes(64 + 12), version=2, alignment=64))
    header = read_header(path)
    for kind, (_, value) in kinds.items():
        assert header.fields[f"kind.{kind}"] == value
        assert header.fields[f"many.{kind}"] == [value, value]
    assert header.tensors["scalar"].shape == ()
    assert header.tensors["scalar"].end - header.tensors["scalar"].begin == 4
    assert header.tensors["empty"].shape == (5, 0)
    assert header.tensors["last"].begin % 64 == 0
    assert header.tensors["last"].end == path.stat().st_size


ALIGNMENT = "general.alignment"
DAMAGED = {
    "empty": (b"", "is empty"),
    "short": (b"GGU", "is no GGUF file"),
    "magic": (b"GGML" + bytes(40), r"is no GGUF file: it begins with b'GGML'"),
    "only magic": (b"GGUF", "cut short"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS.*git lfs pull"),
    "version 1": (raw_gguf(version=1), "GGUF of version 1; supported are 2 and 3: convert"),
    "version 4": (raw_gguf(version=4), "GGUF of version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF file, which is not supported"),
    "no counts": (raw_gguf()[:12], "the number of tensors needs 8 bytes, but 4 are left"),
    "fields": (raw_gguf(n_fields=HUGE), f"the number of fields is {HUGE}, but"),
    "tensors": (raw_gguf(n_tensors=HUGE), f"the number of tensors is {HUGE}, but"),
    "one field too many": (raw_gguf(n_fields=1, data=bytes(3)), "the number of fields is 1"),
    "tensors after fields": (
        raw_gguf([field("a", STRING, text("b" * 40))], n_tensors=2),
        "the number of tensors is 2, but",
    ),
    "key": (raw_gguf([struct.pack("<Q", HUGE) + bytes(13)]), f"the key of field 0 needs {HUGE} bytes"),
    "key no text": (raw_gguf([field("a", 0, b"\0")[:8] + b"\xff" + bytes(5)]), "the key of field 0 is no UTF-8"),
    "twice": (raw_gguf([field("a", 0, b"\0")] * 2), "field 'a' occurs twice"),
    "kind": (raw_gguf([field("a", 13, bytes(8))]), "field 'a' has the unknown type 13"),
    "kinds": (raw_gguf([field("a", ARRAY, struct.pack("<IQ", 77, 1))], data=bytes(8)), "'a' has the unknown type 77"),
    "value": (raw_gguf([field("a", STRING, struct.pack("<Q", 2**63))]), f"field 'a' needs {2**63} bytes"),
    "nested": (
        raw_gguf([field("a", ARRAY, struct.pack("<IQIQ", ARRAY, 1, 0, 0))]),
        "field 'a' is an array of arrays, which no GGUF file has",
    ),
    "length": (raw_gguf([field("a", ARRAY, struct.pack("<IQ", 12, HUGE))]), f"the length of field 'a' is {HUGE}"),
    "strings": (raw_gguf([field("a", ARRAY, struct.pack("<IQ", 8, HUGE))]), f"the length of field 'a' is {HUGE}"),
    "string in it": (
        raw_gguf([field("a", ARRAY, struct.pack("<IQQQ", 8, 2, HUGE, 0))]),
        "field 'a' ends beyond the header",
    ),
    "last string": (
        raw_gguf([field("a", ARRAY, struct.pack("<IQQ", 8, 1, 2**40))]),
        "field 'a' ends beyond the header",
    ),
    "alignment 0": (raw_gguf([field(ALIGNMENT, UINT32, bytes(4))]), "alignment is 0; needed is a power of two"),
    "alignment 3": (raw_gguf([field(ALIGNMENT, UINT32, b"\3\0\0\0")]), "alignment is 3"),
    "alignment text": (raw_gguf([field(ALIGNMENT, STRING, text("32"))]), "alignment is '32'"),
    "dimensions": (raw_gguf(tensors=[tensor("a", (1,) * 5)]), "tensor 'a' has 5 dimensions; GGUF has up to 4"),
    "dimensions 2": (raw_gguf(tensors=[text("a") + b"\xff" * 4 + bytes(12)]), "tensor 'a' has 4294967295 dimensions"),
    "type": (
        raw_gguf(tensors=[tensor("blk.0.a", kind=139)]),
        r"tensor 'blk\.0\.a' has the type 139, which is not known\. Experts may have F32, F16, Q4_0.*MXFP4: take",
    ),
    "rows": (raw_gguf(tensors=[tensor("a", (48, 32), 8)]), "'a' has rows of 48 weights; q8_0 has blocks of 32"),
    "scalar": (raw_gguf(tensors=[tensor("a", (), 8)]), "'a' has rows of 1 weights"),
    "names": (raw_gguf(tensors=[tensor("a"), tensor("a", offset=128)], data=bytes(256)), "tensor 'a' occurs twice"),
    "name no text": (raw_gguf(tensors=[tensor(b"\xff")], data=bytes(128)), "the name of tensor 0 is no UTF-8"),
    "beyond": (raw_gguf(tensors=[tensor("a")], data=bytes(127)), r"tensor 'a', f32 \[32\], lies at bytes 64\.\.192 of"),
    "offset": (raw_gguf(tensors=[tensor("a", offset=2**64 - 32)], data=bytes(128)), "tensor 'a', f32 .*lies at bytes"),
    "sizes": (
        raw_gguf(tensors=[tensor("a", (2**62, 2**62, 2**62))], data=bytes(128)),
        "tensor 'a', f32.*lies at bytes",
    ),
    "aligned": (
        raw_gguf(tensors=[tensor("a", offset=8)], data=bytes(256)),
        "tensor 'a' begins at 8, no multiple of 32",
    ),
    "overlap": (raw_gguf(tensors=[tensor("a"), tensor("b", offset=96)], data=bytes(256)), "'a' and 'b' overlap"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_says_where(case, tmp_path):
    content, message = DAMAGED[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_one_field_is_read_whole(tmp_path):
    fields = {"before": ["x", "y"], "words": [f"ü{n}" for n in range(5000)], "numbers": list(range(5000)), "one": 7}
    path = write_gguf(tmp_path / "model.gguf", {"norm": np.ones(4, np.float32)}, fields=fields)
    assert read_header(path).fields["words"] == PassedOver(5000)
    for key, value in fields.items():
        assert read_field(path, key) == value
    assert read_field(path, "absent") is None
    path.write_bytes(raw_gguf([field("words", ARRAY, struct.pack("<IQ", STRING, 2) + text("a"))], n_tensors=0))
    with pytest.raises(ValueError, match=r"field 'words'.*cut short or damaged"):
        read_field(path, "words")


def test_cut_short_anywhere(tmp_path):
    """No prefix of a file is a file: its tensors end where it ends."""
    path = write_gguf(tmp_path / "model.gguf", Experts(SHAPE).tensors(), fields={"words": ["a", "b"]})
    content = path.read_bytes()
    end = read_header(path).bytes
    for size in [*range(end + 40), len(content) - 40]:
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"model\.gguf"):
            read_header(path)


def test_large_headers_are_read_fast(tmp_path):
    """1,500 tensors beside a vocabulary of 150,000 tokens and as many merges.

    Measured: 6 ms for the tensors, 37 ms for the strings.
    """
    tensors = [tensor(f"blk.{n // 20}.tensor_{n % 20}.weight", (256, 4, 2), 12, 1152 * n) for n in range(1500)]
    words = b"".join(text(f"token {n}") for n in range(150_000))
    strings = [field(name, ARRAY, struct.pack("<IQ", STRING, 150_000) + words) for name in ("tokens", "merges")]
    plain, full = tmp_path / "plain.gguf", tmp_path / "full.gguf"
    plain.write_bytes(raw_gguf([], tensors, bytes(1152 * 1500)))
    full.write_bytes(raw_gguf(strings, tensors, bytes(1152 * 1500)))

    def seconds(path) -> float:
        times = []
        for _ in range(5):
            path.touch()  # else it is remembered
            start = time.perf_counter()
            assert len(read_header(path).tensors) == 1500
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(plain) < 0.05
    assert seconds(full) < 0.3
    assert read_header(full) is read_header(full)
