"""Floats to bf16, as bits: numpy has no bf16, so its bits travel as uint16."""

import numpy as np

_CHUNK = 1 << 20  # elements converted at a time: bounds what is in memory beside source and result

BF16_LIMIT = 2.0**128 * (1 - 2.0**-9)  # from here on values round to infinity in bf16


def _round(values: np.ndarray) -> np.ndarray:
    """To nearest even; NaN stays NaN."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def round_finite(values: np.ndarray) -> np.ndarray:
    """Finite f32 to bf16 bits, to nearest even. Overwrites `values`, which must be contiguous."""
    bits = values.view(np.uint32)
    up = bits >> np.uint32(16)
    up &= np.uint32(1)
    up += np.uint32(0x7FFF)
    bits += up
    return bits.view(np.uint16)[..., 1::2].copy()  # little-endian: the upper half


def round_once(values: np.ndarray) -> np.ndarray:
    """f64 to bf16 bits, to nearest even. Finite, and still so in bf16.

    By way of f32, rounded to odd there: a bit that is set whenever something was cut off keeps the second rounding from
    seeing ties that are none.
    """
    values = np.ascontiguousarray(values)
    narrow = values.astype(np.float32)
    inexact, away = narrow != values, np.abs(narrow) > np.abs(values)
    bits = narrow.view(np.uint32)
    bits -= away.astype(np.uint32)
    bits |= inexact.astype(np.uint32)
    return round_finite(narrow)


def to_f32(array: np.ndarray) -> np.ndarray:
    """bf16 bits, f16 or f32: exact."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def to_f32_exactly(tensor: object, name: str) -> np.ndarray:
    """What to_bf16 takes, without rounding."""
    if hasattr(tensor, "bfloat16"):
        _check_torch(tensor, name)
        return tensor.detach().float().contiguous().numpy()
    array = np.asarray(tensor)
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    _check_numpy(array, name)
    return np.ascontiguousarray(to_f32(array))


def to_bf16(tensor: object, name: str) -> object:
    """A tensor that the bindings read as bf16: its own memory if it is bf16 already, else a copy.

    Takes torch tensors (bf16, f16, f32) and numpy arrays (bf16 as ml_dtypes has it or as uint16 bits, f16, f32).
    """
    if hasattr(tensor, "bfloat16"):  # a torch tensor, without torch having to be installed
        _check_torch(tensor, name)
        return tensor.detach().bfloat16()
    array = np.asarray(tensor)
    if array.dtype == np.uint16:
        return array
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    _check_numpy(array, name)
    array = np.ascontiguousarray(array)
    bits = np.empty(array.shape, np.uint16)
    source, target = array.reshape(-1), bits.reshape(-1)
    for begin in range(0, source.size, _CHUNK):
        target[begin : begin + _CHUNK] = _round(source[begin : begin + _CHUNK])
    return bits


def _check_torch(tensor: object, name: str) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; weights must be on the CPU: use {name}.cpu()")
    if str(tensor.dtype) not in {"torch.bfloat16", "torch.float16", "torch.float32"}:
        raise TypeError(f"{name} holds {tensor.dtype}; weights must be bf16, f16 or f32")


def _check_numpy(array: np.ndarray, name: str) -> None:
    if array.dtype not in (np.uint16, np.float16, np.float32):  # uint16: bits of bf16
        raise TypeError(f"{name} holds {array.dtype}; weights must be bf16, f16 or f32")
