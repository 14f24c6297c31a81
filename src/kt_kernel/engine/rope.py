"""Rotary frequencies that would change with the longest text of a forward are fixed to those of the context.

transformers chooses them (longrope: the short or the long factors; dynamic: a base that grows) by the largest position
of a call. With many requests in a call, one's keys would depend on another's length, and a prompt's first chunk would
have other frequencies than its last. Texts beyond the original length get what transformers gives them; shorter ones,
where the context is longer, the long factors, as in other serving engines.
"""

import torch
from torch import nn


def pin_frequencies(model: nn.Module, context: int) -> int:
    """Returns how many modules needed it."""
    modules = [module for module in model.modules() if _depends_on_length(module)]
    for module in modules:
        module.register_forward_pre_hook(lambda _, args, kwargs: _with_last(args, kwargs, context), with_kwargs=True)
        module.register_forward_hook(lambda _, args, output: _without_last(output))
    return len(modules)


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in kinds)


def _without_last(tables: "tuple[torch.Tensor, ...] | torch.Tensor") -> "tuple[torch.Tensor, ...] | torch.Tensor":
    """cos and sin, or both as one complex table."""
    if isinstance(tables, torch.Tensor):
        return tables[..., :-1, :]
    return tuple(table[..., :-1, :] for table in tables)


def _with_last(args: tuple, kwargs: dict, context: int) -> tuple[tuple, dict]:
    """Adds the last position of the context to each row; its row of the tables is dropped again."""
    given = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    last = torch.full_like(given[..., :1], context - 1)
    positions = torch.cat([given, last], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs
