"""Writes the files that canonical.py reads: all of a layer, or nothing."""

import json
from pathlib import Path

import numpy as np

from kt_kernel.weights.canonical import Coded, file_name, metadata, tensor_name, tensors_of
from kt_kernel.weights.experts import PROJECTIONS, Sizes
from kt_kernel.weights.whole_file import WholeFile

_ALIGNMENT = 64


def _layout(layer_idx: int, weight_format: str, count: int, sizes: Sizes) -> tuple[bytes, dict[str, int], int]:
    """The head of the file, tensor -> where it starts in the file, bytes of the file."""
    tensors = {
        tensor_name(layer_idx, projection, expert, tensor.kind): tensor
        for expert in range(count)
        for projection in PROJECTIONS
        for tensor in tensors_of(weight_format, *sizes.shape(projection))
    }
    fields: dict[str, object] = {"__metadata__": metadata(weight_format)}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].kind != "scale"):
        fields[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.bytes]}
        at += tensor.bytes
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    begin = 8 + len(header)
    starts = {name: begin + fields[name]["data_offsets"][0] for name in tensors}
    return len(header).to_bytes(8, "little") + header, starts, begin + at


class LayerWriter:
    """write() every expert, in any order. A context manager: the file appears at its end, if nothing was raised."""

    def __init__(self, folder: Path, layer_idx: int, weight_format: str, count: int, sizes: Sizes):
        self.path = folder / file_name(layer_idx)
        self._layer_idx, self._format, self._sizes, self._missing = layer_idx, weight_format, sizes, set(range(count))
        self._head, self._starts, size = _layout(layer_idx, weight_format, count, sizes)
        self._file = WholeFile(self.path, size, "converted weights", "layer-*.safetensors.tmp")

    def write(self, expert: int, coded: list[Coded]) -> None:
        for projection, arrays in zip(PROJECTIONS, coded, strict=True):
            tensors = tensors_of(self._format, *self._sizes.shape(projection))
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
