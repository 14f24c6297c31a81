"""Linears of a model that torch keeps when the others are packed."""

import inspect
import re
from contextlib import suppress
from functools import cache

from torch import nn

from kt_kernel.hf.experts import is_experts

_MAKING = ("__init__", "_init_weights", "tie_weights")


def kept_linears(model: nn.Module) -> set[str]:
    """Names of linears that choose among experts, where rounding would choose others, and of those whose parameters the
    model's code reads itself.
    """
    found = set()
    for name, experts in model.named_modules():
        if is_experts(experts):
            block, _, _ = name.rpartition(".")
            inside = model.get_submodule(block).named_modules(prefix=block)
            found.update(inner for inner, module in inside if _chooses_among(experts, module))
    for prefix, parent in model.named_modules():
        for child, module in parent.named_children():
            if isinstance(module, nn.Linear) and child in _read_by(type(parent)):
                found.add(f"{prefix}.{child}" if prefix else child)
    return found


def _chooses_among(experts: nn.Module, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == experts.num_experts


@cache
def _read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Children whose weight or bias the code of this class asks for, once it is made."""
    found = set()
    for name, member in inspect.getmembers(kind, inspect.isfunction):
        if name not in _MAKING and not member.__module__.startswith("torch."):
            with suppress(OSError, TypeError):  # made at run time
                found.update(re.findall(r"\bself\.(\w+)\.(?:weight|bias)\b", inspect.getsource(member)))
    return frozenset(found)
