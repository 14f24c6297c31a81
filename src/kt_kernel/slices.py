"""Slices of experts for the ranks of a tensor-parallel GPU, in the bytes of the checkpoint, at given addresses."""

import operator
from collections.abc import Sequence

from kt_kernel import _core
from kt_kernel.arguments import whole_number
from kt_kernel.methods import METHODS


def write_task(
    layer: "_core.MoELayer",
    num_experts: int,
    gpu_tp_count: int,
    expert_id: int,
    w13_weight_ptrs: Sequence[int],
    w13_scale_ptrs: Sequence[int],
    w2_weight_ptrs: Sequence[int],
    w2_scale_ptrs: Sequence[int],
) -> "_core.WriteSlicesTask":
    """Checks everything but whether the expert has weights, which is known when the task runs."""
    if not _core.has_slices(layer.format):
        able = ", ".join(method for method, name in METHODS.items() if _core.has_slices(name))
        raise NotImplementedError(
            f"write_weight_scale_to_buffer cannot write experts that are kept in {layer.format}; methods that can are "
            f"{able}"
        )
    ranks = whole_number("gpu_tp_count", gpu_tp_count, 1)
    expert = whole_number("expert_id", expert_id, 0, num_experts - 1, "num_experts - 1")
    scaled = layer.format != "bf16"
    lists = [
        _addresses("w13_weight_ptrs", w13_weight_ptrs, ranks),
        _addresses("w13_scale_ptrs", w13_scale_ptrs, ranks) if scaled else [0] * ranks,
        _addresses("w2_weight_ptrs", w2_weight_ptrs, ranks),
        _addresses("w2_scale_ptrs", w2_scale_ptrs, ranks) if scaled else [0] * ranks,
    ]
    try:
        return _core.WriteSlicesTask(layer, ranks, expert, *lists)
    except ValueError as error:
        message = str(error).replace("intermediate_size", "moe_intermediate_size")
        raise ValueError(f"gpu_tp_count={ranks}: {message}") from None


def _addresses(name: str, pointers: Sequence[int], ranks: int) -> list[int]:
    try:
        addresses = [operator.index(pointer) for pointer in pointers]
    except TypeError:
        raise TypeError(f"{name}={pointers!r}; pass a list of {ranks} addresses (gpu_tp_count), as ints") from None
    if len(addresses) != ranks:
        raise ValueError(f"{name} has {len(addresses)} addresses; gpu_tp_count is {ranks}, and they must be equal")
    for rank, address in enumerate(addresses):
        if not 0 < address < 1 << 64:
            raise ValueError(f"{name}[{rank}]={address}; pass the address of host memory")
    return addresses
