"""Floats to bf16, as bits: numpy has no bf16, so its bits travel as uint16."""

import numpy as np

_CHUNK = 1 << 20  # elements converted at a time: bounds what is in memory beside source and result


def _round(values: np.ndarray) -> np.ndarray:
    """To nearest even; NaN stays NaN."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def to_bf16(tensor: object, name: str) -> object:
    """A tensor that the bindings read as bf16: its own memory if it is bf16 already, else a copy.

    Takes torch tensors (bf16, f16, f32) and numpy arrays (bf16 as ml_dtypes has it or as uint16 bits, f16, f32).
    """
    if hasattr(tensor, "bfloat16"):  # a torch tensor, without torch having to be installed
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; weights must be on the CPU: use {name}.cpu()")
        if str(tensor.dtype) not in {"torch.bfloat16", "torch.float16", "torch.float32"}:
            raise TypeError(f"{name} holds {tensor.dtype}; weights must be bf16, f16 or f32")
        return tensor.detach().bfloat16()
    array = np.asarray(tensor)
    if array.dtype == np.uint16:
        return array
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    if array.dtype not in (np.float16, np.float32):
        raise TypeError(f"{name} holds {array.dtype}; weights must be bf16, f16 or f32")
    array = np.ascontiguousarray(array)
    bits = np.empty(array.shape, np.uint16)
    source, target = array.reshape(-1), bits.reshape(-1)
    for begin in range(0, source.size, _CHUNK):
        target[begin : begin + _CHUNK] = _round(source[begin : begin + _CHUNK])
    return bits
