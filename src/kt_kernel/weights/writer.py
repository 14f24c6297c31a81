"""Writes the files that canonical.py reads: all of a layer, or nothing."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kt_kernel.weights.canonical import Coded, Tensor, bias_of, file_name, metadata, tensor_name, tensors_of
from kt_kernel.weights.experts import PROJECTIONS, Sizes
from kt_kernel.weights.tensor_writer import TensorSpec, TensorWriter, layout

LEFTOVERS = "layer-*.safetensors.tmp"


def _tensors_of(weight_format: str, sizes: Sizes, projection: str, biases: bool) -> list[Tensor]:
    rows, depth = sizes.shape(projection)
    return [*tensors_of(weight_format, rows, depth), *([bias_of(rows)] if biases else [])]


def _all_tensors(layer_idx: int, weight_format: str, count: int, sizes: Sizes, biases: bool) -> dict[str, TensorSpec]:
    tensors = {
        tensor_name(layer_idx, projection, expert, tensor.kind): TensorSpec(tensor.dtype, tensor.shape)
        for expert in range(count)
        for projection in PROJECTIONS
        for tensor in _tensors_of(weight_format, sizes, projection, biases)
    }
    return dict(sorted(tensors.items(), key=lambda item: item[1].dtype != "F32"))


def file_bytes(layer_idx: int, weight_format: str, count: int, sizes: Sizes, biases: bool) -> int:
    return layout(_all_tensors(layer_idx, weight_format, count, sizes, biases), metadata(weight_format)).bytes


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
        tensors = _all_tensors(layer_idx, weight_format, count, sizes, biases)
        self._file = TensorWriter(self.path, tensors, metadata(weight_format), "converted weights", LEFTOVERS)

    def write(self, expert: int, coded: list[Coded], biases: Sequence[np.ndarray] = ()) -> None:
        """coded and biases: of gate, up and down."""
        if self._biases:
            coded = [(*arrays, bias) for arrays, bias in zip(coded, biases, strict=True)]
        for projection, arrays in zip(PROJECTIONS, coded, strict=True):
            tensors = _tensors_of(self._format, self._sizes, projection, self._biases)
            for tensor, array in zip(tensors, arrays, strict=True):
                self._file.write(tensor_name(self._layer_idx, projection, expert, tensor.kind), array)
        self._missing.discard(expert)

    def __enter__(self) -> "LayerWriter":
        self._file.__enter__()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None and self._missing:
            error = ValueError(f"{self.path}: expert {min(self._missing)} was not written")
            self._file.__exit__(type(error), error, trace)
            raise error
        self._file.__exit__(kind, error, trace)
