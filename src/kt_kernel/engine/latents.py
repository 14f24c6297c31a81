"""Multi-head latent attention (MLA): attention over latents as they are kept, without expanding them.

A key of head h is [K_h c | r] and its value V_h c, with one latent c and one turned key r for all heads; K_h and V_h
are rows of kv_b. As q . K_h c = K_h^T q . c, all heads can as well attend to one key [c | r] whose value is c.

transformers expands the latents of all tokens so far whenever it attends. That is the better way for many queries,
which then meet 192 + 128 elements of a key instead of 576 + 512, but takes as long for one query as for hundreds.
"""

from dataclasses import dataclass

import torch
from torch import nn

from kt_kernel import _core
from kt_kernel.engine.rows import current_rows
from kt_kernel.hf.linear import KTLinear

# Queries of a forward from which on latents are expanded. A layer of 16 heads behind 2,048 tokens, kept and expanded,
# in ms of one core of Zen 4: 1 query 4 and 67, 32 queries 38 and 78, 128 queries 144 and 139, 256 queries 312 and 212.
EXPANDED_FROM = 128


@dataclass
class Heads:
    """kv_b of an attention as two matrices of all heads; on our kernels, or views of torch's weights."""

    kv_b: nn.Module
    k_up: "_core.Linear | torch.Tensor"  # [heads * rank, nope]: K_h^T; of torch [heads, nope, rank]
    v_up: "_core.Linear | torch.Tensor"  # [heads * value_dim, rank]: V_h; of torch [heads, rank, value_dim]
    heads: int
    nope: int
    value_dim: int
    rank: int

    @classmethod
    def of(cls, attention: nn.Module) -> "Heads":
        """Made once for the kv_b that the attention has."""
        found = vars(attention).get("kt_heads")
        if found is None or found.kv_b is not attention.kv_b_proj:
            found = attention.kt_heads = cls._of(attention)
        return found

    @classmethod
    def _of(cls, attention: nn.Module) -> "Heads":
        kv_b, heads, nope = attention.kv_b_proj, attention.num_heads, attention.qk_nope_head_dim
        packed = isinstance(kv_b, KTLinear)
        weight = torch.from_numpy(kv_b.kt_linear.decode()) if packed else kv_b.weight.detach()
        keys, values = weight.view(heads, -1, attention.kv_lora_rank).tensor_split([nope], 1)
        sizes = (heads, nope, values.shape[1], attention.kv_lora_rank)
        if not packed:
            return cls(kv_b, keys, values.transpose(1, 2), *sizes)
        return cls(kv_b, _packed(kv_b, keys.transpose(1, 2)), _packed(kv_b, values), *sizes)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """[rows, heads, n, nope + rotary] -> [rows, heads, n, rank + rotary]: what meets [c | r]."""
        parts = query.tensor_split([self.nope], -1)
        return torch.cat([self._multiply(self.k_up, parts[0], self.rank), parts[1]], -1)

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        """Sums of latents [rows, n, heads, rank] -> those of values [rows, n, heads, value_dim]."""
        return self._multiply(self.v_up, mixed.transpose(1, 2), self.value_dim).transpose(1, 2)

    def _multiply(self, matrices: "_core.Linear | torch.Tensor", x: torch.Tensor, width: int) -> torch.Tensor:
        """x [rows, heads, n, k] times the matrix of each head."""
        if isinstance(matrices, torch.Tensor):
            return x @ matrices
        rows, heads, n, depth = x.shape
        dtype, x = x.dtype, x.transpose(1, 2).to(torch.bfloat16).contiguous()
        out = torch.empty(rows, n, heads, width, dtype=torch.bfloat16)
        steps = {"groups": heads, "input_step": depth, "output_step": width}
        matrices.forward(rows * n, x.data_ptr(), heads * depth, out.data_ptr(), heads * width, **steps)
        return out.transpose(1, 2).to(dtype)


def _packed(kv_b: KTLinear, weights: torch.Tensor) -> _core.Linear:
    """[heads, rows, columns] below each other, in bf16 whatever kv_b is: inputs of single heads need no quantising."""
    rows, columns = weights.shape[0] * weights.shape[1], weights.shape[2]
    packed = _core.Linear(kv_b.runtime.pool, format="bf16", rows=rows, columns=columns)
    packed.load(weights.to(torch.bfloat16).reshape(rows, columns))
    return packed


def keep_latents(model: nn.Module) -> int:
    """From now on the model's attentions hand few queries their latents unexpanded; how many there are."""
    found = [module for module in model.modules() if hasattr(module, "expand_kv") and not _has_bias(module.kv_b_proj)]
    for module in found:
        module.expand_kv = _Expansion(module)
    return len(found)


def _has_bias(linear: nn.Module) -> bool:
    """A bias of kv_b, which no model has, would have to be added to every key."""
    return linear.kt_linear.bias if isinstance(linear, KTLinear) else linear.bias is not None


class _Expansion:
    """Stands for the method of an attention that expands what its cache gave it."""

    def __init__(self, attention: nn.Module):
        self._expand = type(attention).expand_kv.__get__(attention)

    def __call__(self, latents: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (latents, turned) if _few_queries() else self._expand(latents, turned)


def _few_queries() -> bool:
    rows = current_rows()
    return rows is not None and rows.n_tokens < EXPANDED_FROM


def are_kept(attention: nn.Module | None) -> bool:
    """Whether the keys and values that this attention hands over are latents and turned keys."""
    return isinstance(getattr(attention, "expand_kv", None), _Expansion) and _few_queries()


def joined(latents: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    """[.., rank] and [.., rotary] as [.., rank + rotary]; a cache has them side by side."""
    rank = latents.shape[-1]
    behind = latents.data_ptr() + rank * latents.element_size()
    if turned.data_ptr() != behind or turned.stride() != latents.stride():
        return torch.cat([latents, turned], -1)
    shape = (*latents.shape[:-1], rank + turned.shape[-1])
    return latents.as_strided(shape, latents.stride(), latents.storage_offset())
