"""Attention over slots, registered with transformers as "kt".

out[h, i] = sum_j softmax_j(scale * q[h, i] . k[h / g, j]) v[h / g, j], over the keys j that query i may see.

What a query may see is transformers' own mask function, asked block by block: a mask of a whole prompt is never made.
The g query heads of a key head become rows of one product, [kv_heads, g * n, d]: keys are not repeated, and a single
query takes 0.1 ms instead of 1.8 ms (32 heads on 4, 512 keys, bf16, 2 cores of Zen 4).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kt_kernel.engine import latents
from kt_kernel.engine.rows import current_rows

NAME = "kt"

# Rows of a block of grouped queries: a mask of 1,024 rows over 32,768 keys is 32 MB, and larger blocks are no faster.
BLOCK_ROWS = 1024
# Scores of a block where they are written down (sinks, softcap, values deeper than keys): 64 MB in f32.
BLOCK_SCORES = 1 << 24

# A larger mask costs nothing beside the attention over it, and those of all blocks would take 0.5 GB at 32,768 keys.
KEPT_MASK = 1 << 20

# What models pass along that changes no attention here. Anything else that is not None is refused, and the engine runs
# the model on its own cache instead.
_HARMLESS = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "logits_to_keep", "num_items_in_batch", "return_dict"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
)


@dataclass
class Pattern:
    """Which keys queries see. Small masks are kept for the layers of one forward, which share the pattern."""

    mask_function: Callable
    reach: int | None = None  # no query sees further back
    masks: dict[tuple[int, int, int], tuple[int, torch.Tensor | None]] = field(default_factory=dict)

    def keys(self, first: int, last: int, groups: int, device: torch.device) -> tuple[int, torch.Tensor | None]:
        """Of queries first..last - 1: the first key that matters, and the mask of keys up to last; None: all seen."""
        found = self.masks.get((first, last, groups))
        if found is None:
            found = self._keys(first, last, groups, device)
            if found[1] is None or found[1].numel() <= KEPT_MASK:
                self.masks[first, last, groups] = found
        return found

    def _keys(self, first: int, last: int, groups: int, device: torch.device) -> tuple[int, torch.Tensor | None]:
        start = 0 if self.reach is None else max(0, first + 1 - self.reach)
        if last == first + 1 and self.mask_function is causal_mask_function:
            return start, None
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        queries = torch.arange(first, last, device=device)[None, None, :, None]
        keys = torch.arange(start, last, device=device)[None, None, None, :]
        seen = self.mask_function(zero, zero, queries, keys)
        seen = seen.expand(1, 1, last - first, last - start)[0, 0]
        if seen.all():
            return start, None
        return start, seen[None].expand(groups, -1, -1).reshape(-1, last - start)


def mask(*, mask_function: Callable = causal_mask_function, local_size: int | None = None, **sizes: object):
    """A stand-in for the mask, with the pattern as an attribute: models hand it to `attend`, or the loss is noticed."""
    if sizes.get("attention_mask") is not None:
        raise ValueError("attention 'kt' takes no padding mask")
    stand_in = torch.empty(1, 1, 1, 1, device=sizes.get("device"))
    stand_in.kt_pattern = Pattern(mask_function, local_size)
    return stand_in


def _pattern_of(attention_mask: torch.Tensor | None, sliding_window: int | None) -> Pattern:
    if attention_mask is not None:
        if not hasattr(attention_mask, "kt_pattern"):
            raise ValueError("the model changes its attention mask: attention 'kt' cannot know what it means")
        return attention_mask.kt_pattern
    if sliding_window:
        return Pattern(sliding_window_causal_mask_function(sliding_window), sliding_window)
    return Pattern(causal_mask_function)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """query [rows, heads, n, d]; key and value of one row [1, kv_heads, length, d], of more [slots, .., max_len, d].

    Latents may come unexpanded.
    """
    if unknown := [name for name, given in others.items() if given is not None and name not in _HARMLESS]:
        raise ValueError(f"attention 'kt' does not know {', '.join(unknown)}")
    if is_causal is False:
        raise ValueError("attention 'kt' is for layers that see nothing behind a token")
    rows = current_rows()
    if rows is None or len(rows.slots) != len(query) or rows.n_tokens != query.shape[2]:
        raise ValueError("attention 'kt' was called outside of a step of the engine")
    pattern = _pattern_of(attention_mask, sliding_window)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    heads = latents.Heads.of(module) if latents.are_kept(module) else None
    if heads is not None:
        query = heads.absorb(query)
        key = value = latents.joined(key, value)
    shape = (len(query), rows.n_tokens, query.shape[1], value.shape[-1])
    out = torch.empty(shape, dtype=query.dtype, device=query.device)
    for row, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
        at = 0 if len(query) == 1 else slot
        _attend_row(query[row], key[at], value[at], position, pattern, scale, s_aux, softcap, out[row])
    return (out if heads is None else heads.expand(out[..., : heads.rank])), None


def _attend_row(query, key, value, position, pattern, scale, sinks, softcap, out) -> None:
    """query [heads, n, d] at positions position.. over key [kv_heads, position + n or more, d]; out [n, heads, dv]."""
    heads, n, depth = query.shape
    kv_heads = len(key)
    groups = heads // kv_heads
    value_depth = value.shape[-1]
    fused = sinks is None and softcap is None and value_depth <= depth
    if fused and value_depth < depth:  # of MLA: torch's fused attention wants values as deep as keys
        value = F.pad(value, (0, depth - value_depth))
    rows = BLOCK_ROWS // groups if fused else BLOCK_SCORES // (heads * (position + n))
    rows = max(1, min(rows, n))
    for first in range(0, n, rows):
        last = min(first + rows, n)
        start, seen = pattern.keys(position + first, position + last, groups, query.device)
        q = query[:, first:last].reshape(1, kv_heads, -1, depth)
        k = key[None, :, start : position + last]
        v = value[None, :, start : position + last]
        if fused:
            block = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        else:
            block = _explicit(q, k, v, seen, scale, sinks, softcap)
        out[first:last] = block.view(heads, last - first, -1)[..., :value_depth].transpose(0, 1)


def _explicit(q, k, v, seen, scale, sinks, softcap) -> torch.Tensor:
    """The same with scores written down. A sink is a key of its head with the given score and a value of 0."""
    scores = (q @ k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    kv_heads, rows = q.shape[1:3]
    sink = sinks.float().view(kv_heads, -1, 1).expand(-1, -1, rows * kv_heads // len(sinks))
    scores = torch.cat([scores, sink.reshape(1, kv_heads, rows, 1)], -1)
    return scores.softmax(-1)[..., :-1].to(v.dtype) @ v


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
