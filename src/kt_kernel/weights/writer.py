"""Writes the files that canonical.py reads: all of a layer, or nothing."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kt_kernel.weights.canonical import Coded, Tensor, bias_of, file_name, metadata, tensor_name, tensors_of
from kt_kernel.weights.experts import PROJECTIONS, Sizes
from kt_kernel.weights.whole_file import WholeFile

LEFTOVERS = "layer-*.safetensors.tmp"

_ALIGNMENT = 64


def _tensors_of(weight_format: str, sizes: Sizes, projection: str, biases: bool) -> list[Tensor]:
    rows, depth = sizes.shape(projection)
    return [*tensors_of(weight_format, rows, depth), *([bias_of(rows)] if biases else [])]


def _layout(
    layer_idx: int, weight_format: str, count: int, sizes: Sizes, biases: bool
) -> tuple[bytes, dict[str, int], int]:
    """The head of the file, tensor -> where it starts in the file, bytes of the file."""
    tensors = {
        tensor_name(layer_idx, projection, expert, tensor.kind): tensor
        for expert in range(count)
        for projection in PROJECTIONS
        for tensor in _tensors_of(weight_format, sizes, projection, biases)
    }
    fields: dict[str, object] = {"__metadata__": metadata(weight_format)}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].dtype != "F32"):
        fields[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.bytes]}
        at += tensor.bytes
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    begin = 8 + len(header)
    starts = {name: begin + fields[name]["data_offsets"][0] for name in tensors}
    return len(header).to_bytes(8, "little") + header, starts, begin + at


def file_bytes(layer_idx: int, weight_format: str, count: int, sizes: Sizes, biases: bool) -> int:
    return _layout(layer_idx, weight_format, count, sizes, biases)[2]


class LayerWriter:
    """write() every expert, in any order, from any thread. A context manager: the file appears at its end, if nothing
    was raised.
    """

    def __init__(
        self, folder: Path, layer_idx: int, weight_format: str, count: int, sizes: Sizes, biases: bool = False
    ):
        self.path = folder / file_name(layer_idx)
        self._layer_idx, self._format, self._sizes, self._missing = layer_idx, weight_format, sizes, set(range(count))
        self._biases = biases
        self._head, self._starts, size = _layout(layer_idx, weight_format, count, sizes, biases)
        self._file = WholeFile(self.path, size, "converted weights", LEFTOVERS)

    def write(self, expert: int, coded: list[Coded], biases: Sequence[np.ndarray] = ()) -> None:
        """coded and biases: of gate, up and down."""
        if self._biases:
            coded = [(*arrays, bias) for arrays, bias in zip(coded, biases, strict=True)]
        for projection, arrays in zip(PROJECTIONS, coded, strict=True):
            tensors = _tensors_of(self._format, self._sizes, projection, self._biases)
            for tensor, array in zip(tensors, arrays, strict=True):
                if array.shape != tensor.shape:
                    raise ValueError(f"{projection} {tensor.kind} has shape {array.shape}, not {tensor.shape}")
                start = self._starts[tensor_name(self._layer_idx, projection, expert, tensor.kind)]
                self._file.write_at(start, memoryview(np.ascontiguousarray(array)))
        self._missing.discard(expert)

    def __enter__(self) -> "LayerWriter":
        self._file.__enter__()
        try:
            self._file.write_at(0, self._head)
        except BaseException as error:
            self._file.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind, error, trace) -> None:
        missing = None
        if error is None and self._missing:
            missing = ValueError(f"{self.path}: expert {min(self._missing)} was not written")
        self._file.__exit__(kind, error or missing, trace)
        if missing is not None:
            raise missing
