"""Linears of a model that torch keeps when the others are packed."""

import inspect
import re
from collections.abc import Iterable
from functools import cache

from torch import nn


def kept_linears(model: nn.Module, experts: Iterable[str]) -> set[str]:
    """Names of linears that choose among experts, where rounding would choose others, and of those whose parameters the
    model's code reads itself.
    """
    found = set()
    for name in experts:
        block, _, _ = name.rpartition(".")
        count = model.get_submodule(name).num_experts
        for inner, module in model.get_submodule(block).named_modules(prefix=block):
            if isinstance(module, nn.Linear) and module.out_features == count:
                found.add(inner)
    for prefix, parent in model.named_modules():
        for child, module in parent.named_children():
            if isinstance(module, nn.Linear) and child in _read_by(type(parent)):
                found.add(f"{prefix}.{child}" if prefix else child)
    return found


@cache
def _read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Children whose weight or bias the code of this class asks for."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # made at run time
        return frozenset()
    return frozenset(re.findall(r"\bself\.(\w+)\.(?:weight|bias)\b", source))
