"""GGUF files: experts with random blocks of every type, written by the package gguf, and damaged ones byte by byte."""

import struct
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from layer_reference import Shape

from kt_kernel.ggml_types import EXPERT_TYPES, GgmlType

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: GGUF files were not tested")

PROJECTIONS = ("gate", "up", "down")
TYPES = {kind.name: (type_id, kind) for type_id, kind in EXPERT_TYPES.items()}
LAYER = 3
UINT32, STRING, ARRAY = 4, 8, 9  # types of fields


class _Scale(NamedTuple):
    """Where a block has an f16 scale, and how large it is beside the first."""

    at: int
    factor: float = 1.0


# type -> the scales of a block; the second one centres weights that are codes times scale, plus or less something
_SCALES = {
    "q4_0": [_Scale(0)],
    "q4_1": [_Scale(0), _Scale(2, -7.5)],
    "q5_0": [_Scale(0)],
    "q5_1": [_Scale(0), _Scale(2, -15.5)],
    "q8_0": [_Scale(0)],
    "q2_k": [_Scale(80), _Scale(82, 1.5)],
    "q3_k": [_Scale(108)],
    "q4_k": [_Scale(0), _Scale(2, 7.5)],
    "q5_k": [_Scale(0), _Scale(2, 15.5)],
    "q6_k": [_Scale(208)],
    "tq1_0": [_Scale(52)],
    "tq2_0": [_Scale(64)],
} | {name: [_Scale(0)] for name in ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq4_nl", "iq4_xs")}


def dequantise(data: np.ndarray, name: str) -> np.ndarray:
    """f32, by the package gguf."""
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(TYPES[name][0]))


def _put_scales(blocks: np.ndarray, name: str, scales: np.ndarray) -> None:
    if name == "iq1_m":  # an f16 whose nibbles are the upper ones of four u16
        bits = scales.astype(np.float16).view(np.uint16)
        words = blocks[:, 48:56].view(np.uint16)
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | ((bits >> (4 * i) & 15) << 12).astype(np.uint16)
    elif name == "mxfp4":
        blocks[:, 0] = np.clip(np.round(np.log2(scales)) + 127, 0, 254)
    else:
        for at, factor in _SCALES[name]:
            blocks[:, at : at + 2] = (scales * factor).astype(np.float16).view(np.uint8).reshape(-1, 2)


@lru_cache(maxsize=64)
def _unit(name: str) -> float:
    """Scale of blocks whose weights are about 1 in size."""
    blocks = np.random.default_rng(5).integers(0, 256, (64, TYPES[name][1].bytes), np.uint8)
    _put_scales(blocks, name, np.ones(len(blocks), np.float32))
    return 1 / float(np.sqrt((dequantise(blocks, name).astype(np.float64) ** 2).mean()))


def random_matrix(name: str, rows: int, depth: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes of a row]: any codes, and scales that make weights of about 1 / sqrt(depth)."""
    kind: GgmlType = TYPES[name][1]
    if kind.block == 1:
        values = (rng.standard_normal((rows, depth)) / depth**0.5).astype(np.float32)
        if name == "bf16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype({"f32": np.float32, "f16": np.float16}[name]).view(np.uint8)
    blocks = rng.integers(0, 256, (rows * depth // kind.block, kind.bytes), np.uint8)
    _put_scales(blocks, name, rng.uniform(0.5, 1.5, len(blocks)) * _unit(name) / depth**0.5)
    return blocks.reshape(rows, -1)


class Experts:
    """Random experts in the types of gate, up and down, and the ways to name them."""

    def __init__(self, shape: Shape, types: str | tuple[str, str, str] = "q8_0", seed: int = 0):
        self.shape, self.types = shape, (types,) * 3 if isinstance(types, str) else types
        sizes = ((shape.intermediate, shape.hidden),) * 2 + ((shape.hidden, shape.intermediate),)
        rng = np.random.default_rng([seed, 77])
        self.data = [
            np.stack([random_matrix(name, *size, rng) for _ in range(shape.experts)])
            for name, size in zip(self.types, sizes, strict=True)
        ]

    @property
    def format(self) -> str:
        return self.types[0] if len(set(self.types)) == 1 else "/".join(self.types)

    def expert(self, expert: int) -> tuple[np.ndarray, ...]:
        return tuple(data[expert] for data in self.data)

    def decoded(self, expert: int) -> tuple[np.ndarray, ...]:
        return tuple(dequantise(data, name) for data, name in zip(self.expert(expert), self.types, strict=True))

    def tensors(self, naming: str = "packed", layer: int = LAYER) -> dict[str, tuple[np.ndarray, str]]:
        """name -> bytes and type."""
        base = f"blk.{layer}.ffn"
        both = zip(PROJECTIONS, self.data, self.types, strict=True)
        if naming == "each":
            return {f"{base}_{p}.{e}.weight": (data[e], t) for p, data, t in both for e in range(self.shape.experts)}
        packed = {f"{base}_{p}_exps.weight": (data, t) for p, data, t in both}
        if naming == "joined":
            gate, up = (packed.pop(f"{base}_{p}_exps.weight") for p in ("gate", "up"))
            packed[f"{base}_gate_up_exps.weight"] = np.concatenate([gate[0], up[0]], axis=1), gate[1]
        return packed


def write_gguf(
    path: Path, tensors: dict, architecture: str = "qwen3moe", fields: dict | None = None, **options
) -> Path:
    """By the package; tensors are (bytes, type), or f32. With split_max_tensors= there are several files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in (fields or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, value in tensors.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
        else:
            data, kind = value
            if kind in ("f32", "f16"):
                writer.add_tensor(name, data.view({"f32": np.float32, "f16": np.float16}[kind]))
            else:
                writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(TYPES[kind][0]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, sizes=(32,), kind: int = 0, offset: int = 0) -> bytes:
    """Sizes innermost first, as in the file."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def raw_gguf(fields=(), tensors=(), data: bytes = b"", n_fields=None, n_tensors=None, version=3, alignment=32) -> bytes:
    """A header out of pieces, with the counts of the pieces or others."""
    counts = len(tensors) if n_tensors is None else n_tensors, len(fields) if n_fields is None else n_fields
    header = struct.pack("<4sIQQ", b"GGUF", version, *counts) + b"".join(fields) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


class RecordingLayer:
    """Stands in for _core.MoELayer: keeps copies of what it is given."""

    has_columns = False
    group_size = 0

    def __init__(self, shape: Shape, weight_format: str, biases: bool = False):
        self.format, self.biases, self.num_experts = weight_format, biases, shape.experts
        self.hidden_size, self.intermediate_size = shape.hidden, shape.intermediate
        self.loaded: dict[int, tuple[np.ndarray, ...]] = {}
        self.loaded_biases: dict[int, tuple[np.ndarray, ...]] = {}
        self.error: str | None = None  # to be raised by the next load

    def load_gguf(self, expert: int, *matrices: np.ndarray) -> None:
        if self.error:
            raise ValueError(self.error)
        assert all(matrix.dtype == np.uint8 and matrix.flags.c_contiguous for matrix in matrices)
        self.loaded[expert] = tuple(matrix.copy() for matrix in matrices)

    def load_biases(self, expert: int, *biases: np.ndarray) -> None:
        assert all(bias.dtype == np.float32 and bias.flags.c_contiguous for bias in biases)
        self.loaded_biases[expert] = tuple(bias.copy() for bias in biases)

    def has(self, slot: int, matrices: tuple[np.ndarray, ...]) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.loaded[slot], matrices, strict=True))
