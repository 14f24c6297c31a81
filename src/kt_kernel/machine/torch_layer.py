"""What torch computes in a layer while a prompt is read: everything but the products with weights.

The same operations as in transformers' decoder layers, on tensors of the model's sizes: two norms over f32, rotary
embedding of heads, keys and values into the cache, attention with a mask, residual sums, and the router with its
softmax and top-k. Small models also wait for Python: a layer of Mixtral makes 120 calls of torch, two thirds of them
views, in 340 calls of Python functions and 11 of modules (counted by profilers of torch and Python), and so does the
one that is measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kt_kernel.bench.timing import quiet, sample
from kt_kernel.machine.decode_overhead import Heads

if TYPE_CHECKING:
    import torch

_FEW, _MANY = 32, 256  # tokens
_MODULES, _FUNCTIONS, _VIEWS = 11, 340, 80  # of a layer


@dataclass(frozen=True)
class TorchLayer:
    layer_us: float  # of a layer, whatever the number of tokens
    token_us: float  # of each token
    pair_us: float  # of each query and key that meet, all heads together

    def seconds(self, tokens: int, keys: float) -> float:
        """Of one layer: `tokens` queries that meet `keys` keys each, on average."""
        return (self.layer_us + tokens * (self.token_us + keys * self.pair_us)) / 1e6


def measure_torch_layer(threads: int, hidden: int, heads: Heads, value_dim: int, seconds: float) -> TorchLayer:
    """`value_dim` differs from head_dim where attention is latent: scores are written down then."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            each = seconds / 3
            few, many = (_time(_rest_of_layer(n, hidden, heads), each) for n in (_FEW, _MANY))
            pairs = _time(_attention(heads, value_dim), each) / _MANY**2
    finally:
        torch.set_num_threads(before)
    token_us = max(0.0, many - few) / (_MANY - _FEW)
    return TorchLayer(max(0.0, few - _FEW * token_us), token_us, pairs)


def measure_sampling_us(vocabulary: int, seconds: float) -> float:
    """A token of a row of logits, by temperature and top_p as most models ask for."""
    import numpy as np

    from kt_kernel.engine.api import Sampling
    from kt_kernel.engine.sampling import Sampler

    logits = np.random.default_rng(0).standard_normal(vocabulary, np.float32) * 3
    sampler = Sampler(Sampling(temperature=0.7, top_p=0.9), ())
    return _time(lambda: sampler.sample(logits), seconds)


def _time(call: Callable[[], object], seconds: float) -> float:
    call()
    return quiet(sample(lambda _: call(), seconds))


def _rest_of_layer(tokens: int, hidden: int, heads: Heads) -> Callable[[], object]:
    import torch

    x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16)
    weight = torch.ones(hidden, dtype=torch.bfloat16)
    query = torch.randn(1, heads.heads, tokens, heads.head_dim, dtype=torch.bfloat16)
    key = torch.randn(1, heads.kv_heads, tokens, heads.head_dim, dtype=torch.bfloat16)
    cos = torch.randn(1, 1, tokens, heads.head_dim, dtype=torch.bfloat16)
    cache = torch.empty(2, heads.kv_heads, tokens, heads.head_dim, dtype=torch.bfloat16)
    router = torch.randn(heads.experts, hidden, dtype=torch.bfloat16)
    module = torch.nn.Identity()

    def function(**options: object) -> object:
        # As most of a layer's do: looks an attribute of a module up, in its dictionaries, and an option.
        return getattr(module, "attribute", options.get("cache"))

    def layer() -> "torch.Tensor":
        normed = _norm(x, weight)
        for rows in (query, key):
            half = rows.shape[-1] // 2
            _ = rows * cos + torch.cat((-rows[..., half:], rows[..., :half]), -1) * cos
        cache.copy_(key.expand(2, -1, -1, -1))
        mixed = query.transpose(1, 2).reshape(1, tokens, -1)
        added = x + normed
        normed = _norm(added, weight)
        logits = torch.nn.functional.linear(normed[0], router)
        shares, _ = torch.topk(torch.softmax(logits.float(), -1), heads.top_k, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        for _ in range(_VIEWS):
            mixed[..., :1]
        for _ in range(_FUNCTIONS):
            function(mask=None, cache=cache)
        for _ in range(_MODULES):
            module(shares)
        return added + normed

    return layer


def _norm(x: "torch.Tensor", weight: "torch.Tensor") -> "torch.Tensor":
    import torch

    floats = x.float()
    return weight * (floats * torch.rsqrt(floats.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _attention(heads: Heads, value_dim: int) -> Callable[[], object]:
    """The attention of the engine: the query heads of a key head are rows of one product."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    groups = heads.heads // heads.kv_heads
    q = torch.randn(1, heads.kv_heads, groups * _MANY, heads.head_dim, dtype=torch.bfloat16)
    k = torch.randn(1, heads.kv_heads, _MANY, heads.head_dim, dtype=torch.bfloat16)
    v = torch.randn(1, heads.kv_heads, _MANY, value_dim, dtype=torch.bfloat16)
    seen = torch.ones(_MANY, _MANY, dtype=torch.bool).tril().repeat(groups, 1)
    if value_dim == heads.head_dim:
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    def explicit() -> "torch.Tensor":
        scores = (q @ k.transpose(2, 3)).float().masked_fill(~seen, float("-inf"))
        return scores.softmax(-1).to(v.dtype) @ v

    return explicit
