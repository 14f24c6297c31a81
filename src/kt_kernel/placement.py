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
