"""Random weights in the formats of checkpoints: those of kt_kernel.verify.codes, for test layers."""

import numpy as np

from kt_kernel import _core
from kt_kernel.verify import codes
from kt_kernel.verify.codes import GROUP_SIZES, pack_nibbles

__all__ = ["GROUP_SIZES", "KEPT", "encode", "group_size", "load", "pack_nibbles"]

KEPT = list(GROUP_SIZES)


def group_size(weight_format: str) -> int:
    return GROUP_SIZES.get(weight_format, 0)


def encode(weight_format: str, weights: np.ndarray, group: int | None = None) -> "_core.EncodedMatrix":
    return codes.encode(weight_format, weights, group).matrix


def load(layer: "_core.MoELayer", expert: int, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> None:
    """bf16 bits into a layer of any format."""
    if layer.format not in GROUP_SIZES:
        layer.load_expert(expert, gate, up, down)
        return
    weights = [(bits.astype(np.uint32) << 16).view(np.float32) for bits in (gate, up, down)]
    group = layer.group_size
    layer.load_encoded(expert, *(encode(layer.format, matrix, group) for matrix in weights))
