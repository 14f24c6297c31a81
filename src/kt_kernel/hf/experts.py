"""The modules of a model that hold experts, and what a layer of ours must know of each.

A module that uses transformers' experts interface has, with E experts of sizes H and I,
    gate_up_proj [E, 2I, H], or up_proj [E, I, H] without gates, and down_proj [E, H, I]
    gate_up_proj [E, H, 2I] and down_proj [E, I, H] where is_transposed
    biases [E, 2I] and [E, H] under these names with _bias, where has_bias
Gates are the first half of gate_up_proj, or, unless is_concatenated, every other row of it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from kt_kernel.hf.activations import Activation, find_activation
from kt_kernel.weights.config import FIELD_NAMES

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_TOP_K = ("top_k", *FIELD_NAMES["num_experts_per_tok"])


@dataclass
class ExpertsModule:
    name: str  # in the model
    module: nn.Module
    layer_idx: int
    num_experts: int
    hidden: int
    intermediate: int
    top_k: int
    activation: Activation | None
    refusal: str | None  # why our kernels cannot compute it

    @property
    def first(self) -> str:
        """The parameter of the first product."""
        return "gate_up_proj" if self.module.has_gate else "up_proj"

    @property
    def parameters(self) -> list[str]:
        """Names, in the module, of what our layer takes over."""
        names = [self.first, "down_proj"]
        return [*names, *(f"{name}_bias" for name in names)] if self.module.has_bias else names

    def drop(self, names: Iterable[str]) -> None:
        """The state dict has these parameters no more: nothing loads them. What initialises modules still finds
        something under their names, and leaves it alone.
        """
        for name in names:
            del self.module._parameters[name]
            vars(self.module)[name] = placeholder = torch.empty(0, device="cpu")
            placeholder._is_hf_initialized = True
        self.module._is_hf_initialized = True


def is_experts(module: nn.Module) -> bool:
    """Also when its parameters were taken over."""
    return all(hasattr(module, flag) for flag in _FLAGS)


def find_experts(model: nn.Module) -> Iterator[ExpertsModule]:
    """Those that have parameters of their own."""
    for name, module in model.named_modules():
        if is_experts(module) and "down_proj" in module._parameters:
            yield _describe(model, name, module)


def _describe(model: nn.Module, name: str, module: nn.Module) -> ExpertsModule:
    experts, *sizes = module.down_proj.shape
    hidden, intermediate = reversed(sizes) if module.is_transposed else sizes
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.)", name)
    top_k = _find_top_k(model.get_submodule(name.rpartition(".")[0]), module)
    activation = find_activation(module)
    found = ExpertsModule(
        name, module, int(numbers[-1]) if numbers else 0, experts, hidden, intermediate, top_k, activation, None
    )
    found.refusal = _refusal(found)
    return found


def _refusal(found: ExpertsModule) -> str | None:
    module = found.module
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each expert"
    if found.activation is None:
        kind = type(getattr(module, "act_fn", module)).__name__
        return f"its activation ({kind}) is none that our kernels compute"
    if not found.activation.gated and module.has_bias:
        return "experts without gates have biases"
    if others := [name for name, _ in module.named_parameters() if name not in found.parameters]:
        return f"it has the parameters {' and '.join(others)} besides"
    if not found.top_k:
        return "how many experts a token has is not to be found in its router or config"
    shape = (found.num_experts, (1 + module.has_gate) * found.intermediate, found.hidden)
    if module.is_transposed:
        shape = (shape[0], shape[2], shape[1])
    if tuple(getattr(module, found.first).shape) != shape:
        return f"{found.first} has shape {list(getattr(module, found.first).shape)} instead of {list(shape)}"
    return None


def _find_top_k(block: nn.Module, experts: nn.Module) -> int:
    """From the router beside the experts, or the config; 0 if neither tells."""
    for holder in (block, *block.children(), getattr(experts, "config", None)):
        for name in _TOP_K:
            value = getattr(holder, name, None)
            if type(value) is int and value > 0:
                return value
    return 0


def split_first(found: ExpertsModule, tensor: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """gate and up [E, I, ...] of the first parameter, or of its bias [E, 2I]: views."""
    if tensor.dim() == 3 and found.module.is_transposed:
        tensor = tensor.transpose(1, 2)
    if not found.module.has_gate:
        return None, tensor
    if found.activation.alternating:
        return tensor[:, ::2], tensor[:, 1::2]
    return tensor[:, : found.intermediate], tensor[:, found.intermediate :]


def straight_down(found: ExpertsModule, tensor: torch.Tensor) -> torch.Tensor:
    """[E, H, I]: a view."""
    return tensor.transpose(1, 2) if found.module.is_transposed else tensor
