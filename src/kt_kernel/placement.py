"""Which experts are on the GPU."""

import ctypes
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kt_kernel.arguments import whole_number

if TYPE_CHECKING:
    import torch

    from kt_kernel import _core


def generate_gpu_experts_masks(activation_freq: "torch.Tensor", num_gpu_experts: int) -> "torch.Tensor":
    """The ``num_gpu_experts`` most used experts of all layers together, as a CPU bool tensor [layers, E].

    ``activation_freq`` counts uses, [layers, E] on any device. A number below 0 counts as 0, one above layers * E as
    that. Among equals the earlier layer, then the smaller id, comes first.
    """
    import torch

    if activation_freq.dim() != 2:
        raise ValueError(f"activation_freq has shape {list(activation_freq.shape)}; it must be [layers, experts]")
    flat = activation_freq.detach().to(device="cpu", dtype=torch.float64).reshape(-1)
    count = min(max(int(num_gpu_experts), 0), flat.numel())
    masks = torch.zeros(flat.numel(), dtype=torch.bool, device="cpu")
    masks[torch.sort(flat, descending=True, stable=True).indices[:count]] = True
    return masks.view(activation_freq.shape)


STRATEGIES = ("uniform", "frequency", "front-loading", "random")


def gpu_budget(num_gpu_experts: int | None, gpu_experts_ratio: float | None, num_experts: int, moe_layers: int) -> int:
    """Experts on the GPU of all layers together: a share of all experts, or so many of each layer; neither is none."""
    if gpu_experts_ratio is not None:
        if not 0 <= gpu_experts_ratio <= 1:
            raise ValueError(f"gpu_experts_ratio={gpu_experts_ratio} is not in 0..1")
        # A ratio that was written as 0.7 of 10 experts means 7, not int(6.999...).
        return int(gpu_experts_ratio * num_experts * moe_layers + 1e-6)
    return whole_number("num_gpu_experts", num_gpu_experts or 0, 0, num_experts, "num_experts") * moe_layers


def place_experts(
    strategy: str,
    budget: int,
    moe_layers: Sequence[int],
    num_layers: int,
    num_experts: int,
    counts: "torch.Tensor | None" = None,
    seed: int = 42,
) -> "torch.Tensor":
    """Which experts are on the GPU, as a CPU bool tensor [num_layers, num_experts]; ``budget`` of them in all.

    "uniform" gives every layer the same number, the first ones one more where it does not divide, and takes the experts
    from 0 on; "front-loading" fills layer after layer; "random" draws pairs of layer and expert, the same ones for a
    seed; "frequency" takes those that ``counts`` [num_layers, num_experts] says are used most, of all layers together,
    and without counts treats all as equal. Rows of layers without experts are True: their whole feed-forward is there.
    """
    import torch

    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}; it must be one of {', '.join(STRATEGIES)}")
    layers = sorted(moe_layers)
    if any(not 0 <= layer < num_layers for layer in layers) or len(set(layers)) != len(layers):
        raise ValueError(f"moe_layers={list(moe_layers)} must be different layers in 0..{num_layers - 1} (num_layers)")
    budget = min(max(int(budget), 0), len(layers) * num_experts)
    rows = torch.zeros(len(layers), num_experts, dtype=torch.bool, device="cpu")
    if strategy == "uniform" and layers:
        each, more = divmod(budget, len(layers))
        for row in range(len(layers)):
            rows[row, : each + (row < more)] = True
    elif strategy == "front-loading":
        rows.view(-1)[:budget] = True
    elif strategy == "random":
        generator = torch.Generator(device="cpu").manual_seed(seed)
        rows.view(-1)[torch.randperm(rows.numel(), generator=generator, device="cpu")[:budget]] = True
    elif strategy == "frequency":
        if counts is not None and list(counts.shape) != [num_layers, num_experts]:
            raise ValueError(f"counts has shape {list(counts.shape)}; the model is [{num_layers}, {num_experts}]")
        used = torch.ones(rows.shape, device="cpu") if counts is None else counts[layers]
        rows = generate_gpu_experts_masks(used, budget)
    masks = torch.ones(num_layers, num_experts, dtype=torch.bool, device="cpu")
    masks[layers] = rows
    return masks


def fill_mask(mask: "torch.Tensor", placement: object, num_gpu_experts: int | None) -> None:
    """Sets ``mask`` [E] from either generation's argument: a mask, a count (ids below it), or neither."""
    import torch

    experts = mask.numel()
    if isinstance(placement, numbers.Integral) and not isinstance(placement, bool):  # the count, in the mask's position
        if num_gpu_experts is not None:
            raise ValueError(
                f"num_gpu_experts was given twice: {placement} in the position of gpu_experts_mask, and "
                f"num_gpu_experts={num_gpu_experts}"
            )
        placement, num_gpu_experts = None, placement
    if placement is not None and num_gpu_experts is not None:
        raise ValueError(f"pass num_gpu_experts (it is {num_gpu_experts}) or gpu_experts_mask, not both")
    if num_gpu_experts is not None:
        mask[: whole_number("num_gpu_experts", num_gpu_experts, 0, experts, "num_experts")] = True
    elif placement is not None:
        if not isinstance(placement, torch.Tensor):
            if not isinstance(placement, Sequence) and not hasattr(placement, "__array__"):
                raise TypeError(
                    f"gpu_experts_mask is a {type(placement).__name__}; pass a bool tensor or list [{experts}], a "
                    "count, or None"
                )
            placement = torch.tensor(placement, device="cpu")
        if placement.dtype != torch.bool or placement.shape != mask.shape:
            raise ValueError(
                f"gpu_experts_mask is {_name(placement.dtype)} {list(placement.shape)}; it must be bool [{experts}]"
            )
        if placement.is_meta:
            raise ValueError("gpu_experts_mask is on the meta device and holds nothing; make it with device='cpu'")
        mask.copy_(placement)


def live_mask(layer: "_core.MoELayer", num_experts: int) -> "torch.Tensor":
    """The bytes that the layer reads at every forward, as a bool tensor [E]. Change it in place only."""
    import torch

    buffer = (ctypes.c_uint8 * num_experts).from_address(layer.mask_address)
    buffer.owner = layer  # the memory is the layer's; the tensor keeps the buffer
    return torch.frombuffer(buffer, dtype=torch.bool)


def logical_ids(physical_to_logical_map: "torch.Tensor | Sequence[int] | None", num_experts: int) -> list[int]:
    """The map as ints; None is the identity. Which ids there are, only the weights know."""
    if physical_to_logical_map is None:
        return list(range(num_experts))
    values = physical_to_logical_map
    if getattr(values, "is_meta", False):
        raise ValueError("physical_to_logical_map is on meta and has no values; pass a CPU tensor")
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(
            f"physical_to_logical_map is a {type(physical_to_logical_map).__name__}; pass {num_experts} integers "
            "(num_experts) in a tensor or list, or None"
        )
    wrong = next((i for i in values if isinstance(i, bool) or not isinstance(i, numbers.Integral)), None)
    if wrong is not None:
        raise TypeError(
            f"physical_to_logical_map holds {wrong!r}; pass {num_experts} integers (num_experts) in one dimension"
        )
    if len(values) != num_experts:
        raise ValueError(f"physical_to_logical_map has {len(values)} entries; it must have {num_experts} (num_experts)")
    return [int(i) for i in values]


def _name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")
