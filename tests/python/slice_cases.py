"""Slices that ranks of a GPU should get: those of kt_kernel.verify.gpu_slices."""

from kt_kernel.verify.gpu_slices import FORMATS, Buffers, Experts, faults

__all__ = ["FORMATS", "Buffers", "Experts", "assert_slices"]


def assert_slices(buffers: Buffers, experts: Experts, expert: int) -> None:
    assert faults(buffers, experts, expert) == []
    for rank, sizes in enumerate(buffers.sizes):
        wanted = experts.slices(expert, len(buffers.sizes), rank)
        assert {name: len(data) for name, data in wanted.items()} == sizes
