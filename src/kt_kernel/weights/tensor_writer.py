"""Writes a safetensors file, tensor by tensor: whole, or not at all. tensor_files.py says how such a file lies."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kt_kernel.weights.tensor_files import tensor_bits
from kt_kernel.weights.whole_file import WholeFile

_ALIGNMENT = 64


class TensorSpec(NamedTuple):
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return tensor_bits(self.dtype, self.shape) // 8


class Layout(NamedTuple):
    head: bytes
    starts: dict[str, int]  # of tensors, in the file
    bytes: int  # of the file


def layout(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> Layout:
    """Tensors in their order, one behind the other, the first at a multiple of 64."""
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    at, offsets = 0, {}
    for name, tensor in tensors.items():
        offsets[name] = at
        fields[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.bytes]}
        at += tensor.bytes
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    begin = 8 + len(header)
    starts = {name: begin + offset for name, offset in offsets.items()}
    return Layout(len(header).to_bytes(8, "little") + header, starts, begin + at)


class TensorWriter:
    """write() every tensor once, in any order, from any thread. A context manager: the file appears at its end, if
    nothing was raised. `what` and `leftovers` as in WholeFile.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str], what: str, leftovers: str
    ):
        self._tensors, self._missing = tensors, set(tensors)
        self._layout = layout(tensors, metadata)
        self._file = WholeFile(path, self._layout.bytes, what, leftovers)

    def write(self, name: str, array: np.ndarray) -> None:
        """The bytes of the array are those of the tensor: bf16 is uint16."""
        tensor = self._tensors[name]
        if array.shape != tensor.shape or array.nbytes != tensor.bytes:
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, not {tensor.dtype} {list(tensor.shape)}")
        self._file.write_at(self._layout.starts[name], memoryview(np.ascontiguousarray(array)))
        self._missing.discard(name)

    def __enter__(self) -> "TensorWriter":
        self._file.__enter__()
        try:
            self._file.write_at(0, self._layout.head)
        except BaseException as error:
            self._file.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None and self._missing:
            error = ValueError(f"{self._file.path}: tensor {min(self._missing)!r} was not written")
            self._file.__exit__(type(error), error, trace)
            raise error
        self._file.__exit__(kind, error, trace)
