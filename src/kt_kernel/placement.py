"""Which experts are on the GPU."""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    if isinstance(placement, int) and not isinstance(placement, bool):  # the count, in the mask's position
        if num_gpu_experts is not None:
            raise ValueError("num_gpu_experts was given twice")
        placement, num_gpu_experts = None, placement
    if placement is not None and num_gpu_experts is not None:
        raise ValueError("pass num_gpu_experts or gpu_experts_mask, not both")
    if num_gpu_experts is not None:
        if not 0 <= num_gpu_experts <= experts:
            raise ValueError(f"num_gpu_experts={num_gpu_experts} is not in 0..{experts} (num_experts)")
        mask[: int(num_gpu_experts)] = True
    elif placement is not None:
        if not isinstance(placement, torch.Tensor):
            if not isinstance(placement, Sequence):
                raise TypeError(f"gpu_experts_mask is a {type(placement).__name__}; pass a bool tensor, or None")
            placement = torch.tensor(placement, device="cpu")
        if placement.dtype != torch.bool or placement.shape != mask.shape:
            raise ValueError(
                f"gpu_experts_mask is {_name(placement.dtype)} {list(placement.shape)}; it must be bool [{experts}]"
            )
        mask.copy_(placement)


def live_mask(layer: "_core.MoELayer", num_experts: int) -> "torch.Tensor":
    """The bytes that the layer reads at every forward, as a bool tensor [E]. Change it in place only."""
    import torch

    buffer = (ctypes.c_uint8 * num_experts).from_address(layer.mask_address)
    buffer.owner = layer  # the memory is the layer's; the tensor keeps the buffer
    return torch.frombuffer(buffer, dtype=torch.bool)


def _name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")
