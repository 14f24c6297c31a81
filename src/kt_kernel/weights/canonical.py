"""Our own converted files: a layer per file, codes row by row, whatever machine will load them.

layer-{L:05d}.safetensors holds, per expert e and projection p, blk.{L}.ffn_{p}_exps.{e}.* with
  .weight  int8: I8 [N, K]; int4 and int4g: U8 [N, ceil(K / 2)], even k in the low nibble, code + 8
  .scale   F32 [N]
  .steps   int4g only: U8 [N, ceil(K / 64)]
  .bias    F32 [N], of experts that have biases
Experts are in logical order. All floats come first, so that they are aligned; then expert by expert the rest.
"""

from itertools import count
from typing import NamedTuple

import numpy as np

from kt_kernel import _core
from kt_kernel.methods import wrong_method
from kt_kernel.weights.experts import PROJECTIONS, Sizes, count_consecutive
from kt_kernel.weights.tensor_files import TensorFiles

# Of the tensors of each format. Version 1 of int4g had a step for every 32 k.
VERSIONS = {"int8": "1", "int4": "1", "int4g": "2"}
_STEP_GROUP = 64  # Int4g::kGroup

Coded = tuple[np.ndarray, ...]  # codes, scales and, for int4g, steps of one projection


def file_name(layer_idx: int) -> str:
    return f"layer-{layer_idx:05d}.safetensors"


def tensor_name(layer_idx: int, projection: str, expert: int, kind: str) -> str:
    return f"blk.{layer_idx}.ffn_{projection}_exps.{expert}.{kind}"


def metadata(weight_format: str) -> dict[str, str]:
    return {"format": weight_format, "layout_version": VERSIONS[weight_format]}


class Tensor(NamedTuple):
    kind: str
    dtype: str
    shape: tuple[int, ...]


def tensors_of(weight_format: str, rows: int, depth: int) -> list[Tensor]:
    """Of one projection, in the order that _core.quantise gives and load_codes takes."""
    codes = Tensor("weight", "I8", (rows, depth))
    if weight_format != "int8":
        codes = Tensor("weight", "U8", (rows, -(-depth // 2)))
    tensors = [codes, Tensor("scale", "F32", (rows,))]
    if weight_format == "int4g":
        tensors.append(Tensor("steps", "U8", (rows, -(-depth // _STEP_GROUP))))
    return tensors


def bias_of(rows: int) -> Tensor:
    return Tensor("bias", "F32", (rows,))


def has_biases(files: TensorFiles, layer_idx: int) -> bool:
    return tensor_name(layer_idx, "gate", 0, "bias") in files


def stored_format(files: TensorFiles, layer_idx: int) -> str:
    """What the file of a layer says its codes are."""
    first = tensor_name(layer_idx, "gate", 0, "weight")
    said, where = files.metadata_of(first), files.file_of(first)
    if "layout_version" not in said or "format" not in said:
        raise ValueError(
            f"{where} does not say what its codes are (its metadata lacks format or layout_version), so "
            "another program wrote it; convert the original weights"
        )
    version = VERSIONS.get(said["format"])
    if version is not None and said["layout_version"] != version:
        raise ValueError(
            f"{where} has layout version {said['layout_version']!r} of {said['format']}, this kt-kernel reads "
            f"{version!r}: convert the weights again, or use the kt-kernel that wrote them"
        )
    return said["format"]


class CanonicalExperts:
    def __init__(self, files: TensorFiles, layer_idx: int, weight_format: str, sizes: Sizes):
        self._files, self._layer_idx, self._format, self._sizes = files, layer_idx, weight_format, sizes
        first = tensor_name(layer_idx, "gate", 0, "weight")
        self.where = str(files.file_of(first))
        stored = stored_format(files, layer_idx)
        if stored != weight_format:
            raise wrong_method(self.where, stored, weight_format)
        self.count = count_consecutive(tensor_name(layer_idx, "gate", e, "weight") in files for e in count())
        self.biases = has_biases(files, layer_idx)

    def coded(self, projection: str, expert: int) -> Coded:
        return tuple(
            self._files.array(
                tensor_name(self._layer_idx, projection, expert, tensor.kind), (tensor.dtype,), tensor.shape
            )
            for tensor in tensors_of(self._format, *self._sizes.shape(projection))
        )

    def load(self, layer: "_core.MoELayer", slot: int, expert: int) -> None:
        layer.load_codes(slot, *([self.coded(projection, expert)] for projection in PROJECTIONS))
        if self.biases:
            layer.load_biases(slot, *self.bias_vectors(expert))

    def bias_vectors(self, expert: int) -> list[np.ndarray]:
        """f32 gate, up and down, of experts that have biases."""
        return [self._bias(projection, expert) for projection in PROJECTIONS]

    def _bias(self, projection: str, expert: int) -> np.ndarray:
        bias = bias_of(self._sizes.shape(projection)[0])
        return self._files.array(tensor_name(self._layer_idx, projection, expert, bias.kind), (bias.dtype,), bias.shape)

    def will_need(self, expert: int) -> None:
        self._files.will_need(tensor_name(self._layer_idx, p, expert, "weight") for p in PROJECTIONS)

    def forget(self) -> None:
        self._files.forget()

    def __enter__(self) -> "CanonicalExperts":
        return self

    def __exit__(self, *_) -> None:
        self._files.__exit__()
