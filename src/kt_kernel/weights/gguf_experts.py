"""Experts of GGUF files: matrices in the types of ggml, which layers keep byte for byte.

blk.{layer}.ffn_gate_exps.weight    [E, I, H], and ffn_up_exps; ffn_down_exps [E, H, I]
blk.{layer}.ffn_gate_up_exps.weight [E, 2I, H] instead of the first two: gate above up
blk.{layer}.ffn_gate.{expert}.weight  [I, H] and so on: files from before April 2024
blk.{layer}.ffn_gate_exps.bias      [E, I] and so on; f32, f16 or bf16, where there are any
"""

import re
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from kt_kernel import _core
from kt_kernel.ggml_types import EXPERT_FORMATS, layer_format
from kt_kernel.weights.experts import PROJECTIONS, Sizes, count_consecutive
from kt_kernel.weights.floats import to_f32
from kt_kernel.weights.gguf_config import check_activation, layers_with_experts
from kt_kernel.weights.gguf_files import GgufFiles
from kt_kernel.weights.tensor_files import MissingTensorError

_BIAS_TYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


class _Matrix(NamedTuple):
    """Rows of a tensor whose dimensions but the last are taken together."""

    name: str
    first: int
    rows: int


class GgufExperts:
    def __init__(self, files: GgufFiles, layer_idx: int, sizes: Sizes | None = None, weight_format: str | None = None):
        """Without sizes they are those of the first expert. `weight_format` is that of the layer to be filled."""
        self._files, self.where = files, f"{files.path} (layer {layer_idx})"
        self._base = f"blk.{layer_idx}.ffn"
        check_activation(files, layer_idx)
        self._refuse_others()
        self._joined = f"{self._base}_gate_up_exps.weight" in files
        self._packed = any(f"{stem}.weight" in files for stem in self._stems())
        self._check_projections(layer_idx)
        if self._packed:
            shape = files.entry(self._tensor("down", 0)).shape
            self.count = shape[0] if len(shape) == 3 else 0
        else:
            self.count = count_consecutive(self._tensor("down", expert) in files for expert in count())
        self.sizes = sizes or Sizes(*self._first_shape())
        self.format = layer_format(*map(self._check_tensors, PROJECTIONS))
        self.biases = any(f"{stem}.bias" in files for stem in self._stems())
        if weight_format is not None and weight_format != self.format:
            raise ValueError(
                f"{self.where}: the experts are {self.format}, but this layer was made for {weight_format}: make it "
                "when the weights are there, with method='LLAMAFILE'"
            )

    def _stems(self) -> list[str]:
        return [f"{self._base}_{name}_exps" for name in (*PROJECTIONS, "gate_up")]

    def _tensor(self, projection: str, expert: int) -> str:
        if not self._packed:
            return f"{self._base}_{projection}.{expert}.weight"
        return f"{self._base}_{'gate_up' if self._joined and projection != 'down' else projection}_exps.weight"

    def _refuse_others(self) -> None:
        """Tensors beside matrices and biases, such as scales of experts: nobody would apply them."""
        for name in self._files:
            stem, _, kind = name.rpartition(".")
            if kind not in ("weight", "bias") and stem in self._stems():
                raise ValueError(
                    f"{self._files.where(name)}: experts have {kind!r} beside their matrices, which layers do not apply"
                    ", and without it the results would be wrong; take a file of the model in another type"
                )

    def _check_projections(self, layer_idx: int) -> None:
        there = [self._tensor(projection, 0) in self._files for projection in PROJECTIONS]
        if not any(there):
            found = layers_with_experts(self._files)
            has = f"experts of the layers {found[0]}..{found[-1]}" if found else "no tensors of experts"
            raise MissingTensorError(
                f"{self._files.path} has no experts of layer {layer_idx} under a known name such as "
                f"'{self._base}_gate_exps.weight'; it has {has}"
            )
        if there == [False, True, True]:
            raise ValueError(
                f"{self.where}: the experts have no gate, only {self._tensor('up', 0)!r} and "
                f"{self._tensor('down', 0)!r}; layers compute down (silu(gate) * up) only"
            )
        for projection in PROJECTIONS:
            self._files.file_of(self._tensor(projection, 0))

    def _first_shape(self) -> tuple[int, ...]:
        name = self._tensor("down", 0)
        shape = self._files.entry(name).shape
        if len(shape) != (3 if self._packed else 2):
            raise ValueError(f"{self._files.where(name)} has shape {list(shape)}; it must be a matrix")
        return shape[-2:]

    def _check_tensors(self, projection: str) -> str:
        """The type of a projection, once its tensors are what the layer needs."""
        rows, depth = self.sizes.shape(projection)
        if self._joined and projection != "down":
            rows *= 2
        needed = (self.count, rows, depth) if self._packed else (rows, depth)
        first = self._files.entry(self._tensor(projection, 0)).type
        for expert in range(1 if self._packed else self.count):
            name = self._tensor(projection, expert)
            entry = self._files.entry(name)
            if entry.shape != needed:
                raise ValueError(
                    f"{self._files.where(name)} is {entry.type.name} {list(entry.shape)}; needed is {list(needed)}"
                )
            if entry.type.name not in EXPERT_FORMATS:
                raise ValueError(
                    f"{self._files.where(name)} is {entry.type.name}, which no layer computes with: take a file of the "
                    f"model in another type; experts may have {', '.join(sorted(EXPERT_FORMATS))}"
                )
            if entry.type != first:
                raise ValueError(
                    f"{self._files.where(name)} is {entry.type.name}, that of expert 0 is {first.name}; experts of a "
                    "layer must have the same type: take a file of the model in another type"
                )
        return first.name

    def _matrix(self, projection: str, expert: int) -> _Matrix:
        rows, _ = self.sizes.shape(projection)
        first = 0
        if self._packed:
            joined = self._joined and projection != "down"
            first = rows * (2 * expert + (projection == "up")) if joined else rows * expert
        return _Matrix(self._tensor(projection, expert), first, rows)

    def _matrices(self, expert: int) -> Iterator[_Matrix]:
        return (self._matrix(projection, expert) for projection in PROJECTIONS)

    def arrays(self, expert: int) -> list[np.ndarray]:
        """uint8 [N, bytes of a row] of gate, up and down: views of the file."""
        return [self._files.rows(*matrix) for matrix in self._matrices(expert)]

    def load(self, layer: "_core.MoELayer", slot: int, expert: int) -> None:
        try:
            layer.load_gguf(slot, *self.arrays(expert))
        except ValueError as error:
            raise ValueError(self._name_tensor(str(error), expert)) from None
        if self.biases:
            layer.load_biases(slot, *self.bias_vectors(expert))

    def bias_vectors(self, expert: int) -> list[np.ndarray]:
        """f32 gate, up and down, of experts that have biases."""
        return [self._bias(projection, expert) for projection in PROJECTIONS]

    def _name_tensor(self, message: str, expert: int) -> str:
        """A message of the core with file and tensor."""
        for projection in PROJECTIONS:
            if message.startswith(prefix := f"scales of {projection} "):
                where = self._files.where(self._tensor(projection, expert))
                return f"{where} (expert {expert}): scales {message.removeprefix(prefix)}"
        return message

    def _bias(self, projection: str, expert: int) -> np.ndarray:
        """f32 [N]; zeros where only other projections have one."""
        rows, _ = self.sizes.shape(projection)
        both = f"{self._base}_gate_up_exps.bias"
        joined = projection != "down" and both in self._files
        name = both if joined else f"{self._base}_{projection}_exps.bias"
        if name not in self._files:
            return np.zeros(rows, np.float32)
        entry, needed = self._files.entry(name), (self.count, 2 * rows if joined else rows)
        if entry.shape != needed or entry.type.name not in _BIAS_TYPES:
            raise ValueError(
                f"{self._files.where(name)} is {entry.type.name} {list(entry.shape)}; needed is "
                f"{' or '.join(_BIAS_TYPES)} {list(needed)}"
            )
        begin = rows if joined and projection == "up" else 0
        values = self._files.rows(name, expert, 1)[0].view(_BIAS_TYPES[entry.type.name])
        return to_f32(values[begin : begin + rows])

    def will_need(self, expert: int) -> None:
        for matrix in self._matrices(expert):
            self._files.will_need(*matrix)

    def forget(self) -> None:
        self._files.forget()

    def __enter__(self) -> "GgufExperts":
        return self

    def __exit__(self, *_) -> None:
        self._files.__exit__()


def has_gguf_biases(files: GgufFiles, layer_idx: int) -> bool:
    pattern = re.compile(rf"blk\.{layer_idx}\.ffn_(?:gate|up|down|gate_up)_exps\.bias")
    return any(pattern.fullmatch(name) for name in files)
