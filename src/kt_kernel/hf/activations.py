"""Which of our activations a module of experts computes, found by trying: its own function on numbers that tell them
all apart. So a family that comes with a function of its own needs no entry here, and one that computes something else
is noticed.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

_ROWS, _WIDTH = 64, 8
_TOLERANCE = 1e-5  # of the largest result; gelu and its approximation by tanh differ by 5e-5 of it


class Activation(NamedTuple):
    """Arguments of KTMoEWrapper, and how gate and up lie in their tensor."""

    name: str
    limit: float = 0.0
    alpha: float = 0.0
    alternating: bool = False

    @property
    def gated(self) -> bool:
        return self.name not in _UNGATED


def _sloped(gate: torch.Tensor, up: torch.Tensor, alpha: float) -> torch.Tensor:
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


# What `Activation` of cpp/kernels/kernel.h computes of gates, ups and alpha, after the clamps.
_GATED: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "silu": lambda gate, up, _: functional.silu(gate) * up,
    "gelu_tanh": lambda gate, up, _: functional.gelu(gate, approximate="tanh") * up,
    "swigluoai": _sloped,
    "swiglu_alpha": _sloped,
}
_SLOPED = ("swigluoai", "swiglu_alpha")
_CLAMPS_GATES_BELOW = ("swiglu_alpha",)
_UNGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu2": lambda up: functional.relu(up).square()}


def find_activation(module: torch.nn.Module) -> Activation | None:
    """Of a module of experts; None: none of ours."""
    limits, alphas = _numbers(module, "limit"), _numbers(module, "alpha")
    scales = [4.0, *(2 * limit for limit in limits)]  # so that limits matter
    gate, up = (torch.cat([scale * _normal(seed) for scale in scales]) for seed in (0, 1))
    with torch.no_grad():
        if not module.has_gate:
            result = module.act_fn(up)
            return next((Activation(name) for name, compute in _UNGATED.items() if _same(result, compute(up))), None)
        alternating = not module.is_concatenated
        both = torch.stack([gate, up], dim=-1).flatten(1) if alternating else torch.cat([gate, up], dim=1)
        result = module._apply_gate(both)
        for name, limit, alpha in _candidates(limits, alphas):
            if _same(result, _compute(name, gate, up, limit, alpha)):
                return Activation(name, limit, alpha, alternating)
    return None


def _numbers(module: torch.nn.Module, kind: str) -> list[float]:
    """Of the attributes that are called so."""
    found = {name: value for name, value in vars(module).items() if name.endswith(kind)}
    return [float(value) for value in found.values() if type(value) in (int, float) and value > 0]


def _candidates(limits: list[float], alphas: list[float]) -> Iterator[tuple[str, float, float]]:
    for name in _GATED:
        for alpha in alphas if name in _SLOPED else [0.0]:
            for limit in [0.0, *limits]:
                yield name, limit, alpha


def _compute(name: str, gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    if limit:
        gate = gate.clamp(-limit if name in _CLAMPS_GATES_BELOW else None, limit)
        up = up.clamp(-limit, limit)
    return _GATED[name](gate, up, alpha)


def _normal(seed: int) -> torch.Tensor:
    """On the CPU, whatever device torch makes tensors on: the model is on meta now."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(_ROWS, _WIDTH, generator=generator, device="cpu", dtype=torch.float32)


def _same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    if result.shape != expected.shape:
        return False
    return bool((result - expected).abs().max() <= _TOLERANCE * expected.abs().max())
