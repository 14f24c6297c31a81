"""What a layer of the native decoder costs beside its weights: barriers, norms, routing, attention.

A decoder of a few layers is made with the heads, experts and top-k of a model and next to no weights. A step of it at
the start of a text is all overhead; what it takes longer further on is attention.
"""

from dataclasses import dataclass

import numpy as np

from kt_kernel import _core
from kt_kernel.bench.timing import quiet, sample

_LAYERS, _HIDDEN, _VOCABULARY = 4, 64, 64
_FAR = 2048  # keys


@dataclass(frozen=True)
class Heads:
    """What attention and routing look like."""

    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class DecodeOverhead:
    layer_us: float  # of a layer, whatever its weights are
    key_us: float  # of one earlier token, in one layer


def measure_decode_overhead(pool: "_core.Pool", heads: Heads, seconds: float) -> DecodeOverhead:
    decoder, _memory = _decoder(pool, heads)  # the decoder knows it by address only

    def step_us(position: int) -> float:
        numbers = np.array([0, 1, position], np.int64)
        logits = np.empty(_VOCABULARY, np.float32)
        first = numbers.ctypes.data
        arguments = (1, first, first + 8, first + 16, logits.ctypes.data)
        decoder.decode(*arguments)
        return quiet(sample(lambda _: decoder.decode(*arguments), seconds / 2))

    near, far = step_us(1), step_us(_FAR - 1)
    return DecodeOverhead(near / _LAYERS, max(0.0, far - near) / (_FAR - 2) / _LAYERS)


def _decoder(pool: "_core.Pool", heads: Heads) -> tuple["_core.Decoder", list[np.ndarray]]:
    """The decoder, and the arrays that it knows by address."""
    ones = np.ones(_HIDDEN, np.float32)
    embedding = np.full((_VOCABULARY, _HIDDEN), 0x3F80, np.uint16)
    tables = [np.ones((_FAR, heads.head_dim // 2), np.float32) for _ in range(2)]
    memory = [embedding, *tables]
    spec = _core.DecoderSpec(
        hidden=_HIDDEN,
        vocabulary=_VOCABULARY,
        slots=1,
        max_len=_FAR,
        max_batch=1,
        eps=1e-6,
        embedding=embedding.ctypes.data,
        final_norm=ones,
        head=_linear(pool, _VOCABULARY, _HIDDEN),
    )
    queries, keys = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    for _ in range(_LAYERS):
        spec.add_block(attention_norm=ones, ffn_norm=ones)
        spec.set_attention(
            q=_linear(pool, queries, _HIDDEN),
            k=_linear(pool, keys, _HIDDEN),
            v=_linear(pool, keys, _HIDDEN),
            o=_linear(pool, _HIDDEN, queries),
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            scale=heads.head_dim**-0.5,
            rotary=heads.head_dim,
        )
        cache = [np.zeros((heads.kv_heads, _FAR, heads.head_dim), np.uint16) for _ in range(2)]
        memory += cache
        spec.set_memory(
            cos=tables[0].ctypes.data,
            sin=tables[1].ctypes.data,
            keys=cache[0].ctypes.data,
            values=cache[1].ctypes.data,
            slot_pitch=keys * _FAR,
            head_pitch=_FAR * heads.head_dim,
            position_pitch=heads.head_dim,
        )
        spec.set_experts(
            experts=_experts(pool, heads),
            router=_linear(pool, heads.experts, _HIDDEN),
            kind="softmax",
            renormalise=True,
        )
    return _core.Decoder(pool, spec), memory


def _linear(pool: "_core.Pool", rows: int, columns: int) -> "_core.Linear":
    linear = _core.Linear(pool, format="bf16", rows=rows, columns=columns)
    # Weights that differ, so that routing has something to sort.
    linear.load((np.arange(rows * columns, dtype=np.uint16) % 251 + 0x3C00).reshape(rows, columns))
    return linear


def _experts(pool: "_core.Pool", heads: Heads) -> "_core.MoELayer":
    layer = _core.MoELayer(
        pool,
        format="bf16",
        num_experts=heads.experts,
        top_k=heads.top_k,
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN,
        max_tokens=1,
    )
    layer.fill_random(0)
    return layer
