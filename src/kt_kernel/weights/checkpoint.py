"""Experts of original checkpoints in bf16, f16 or f32."""

from itertools import count
from typing import NamedTuple

import numpy as np

from kt_kernel import _core
from kt_kernel.weights.experts import PROJECTIONS, Sizes, count_consecutive, layers_in
from kt_kernel.weights.floats import to_bf16
from kt_kernel.weights.tensor_files import MissingTensorError, TensorFiles

FLOATS = ("BF16", "F16", "F32")

# How models call layer {layer}, most frequent first.
BASES = (
    "model.layers.{layer}",
    "language_model.model.layers.{layer}",
    "model.language_model.layers.{layer}",
    "layers.{layer}",
)


class Scheme(NamedTuple):
    """Tensor names below a base. With {expert} each expert has its own; else all are in one, with gate above up."""

    gate: str
    up: str
    down: str

    @property
    def packed(self) -> bool:
        return self.gate == self.up


# A family of models is a row.
SCHEMES = (
    Scheme(*(f"mlp.experts.{{expert}}.{p}_proj.weight" for p in PROJECTIONS)),
    Scheme(*(f"block_sparse_moe.experts.{{expert}}.{w}.weight" for w in ("w1", "w3", "w2"))),
    Scheme("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)


class CheckpointExperts:
    def __init__(self, files: TensorFiles, layer_idx: int, sizes: Sizes | None = None):
        """Without sizes they are those of the first expert."""
        self._files, self.where = files, f"{files.path} (layer {layer_idx})"
        self._base, self._scheme = _find(files, layer_idx)
        first = files.entry(self._name("down", 0)).shape
        if self._scheme.packed:
            self.count = first[0] if first else 0
        else:
            self.count = count_consecutive(self._name("gate", expert) in files for expert in count())
        if sizes is None:
            if len(first) != (3 if self._scheme.packed else 2):
                raise ValueError(
                    f"{self.where}: {self._name('down', 0)!r} has shape {list(first)}; it must be a matrix"
                )
            sizes = Sizes(*first[-2:])
        self.sizes = sizes

    def _name(self, projection: str, expert: int) -> str:
        return f"{self._base}.{getattr(self._scheme, projection).format(expert=expert)}"

    def _array(self, projection: str, expert: int) -> np.ndarray:
        name, (rows, columns) = self._name(projection, expert), self.sizes.shape(projection)
        if not self._scheme.packed:
            return self._files.array(name, FLOATS, (rows, columns))
        if projection == "down":
            return self._files.array(name, FLOATS, (self.count, rows, columns))[expert]
        both = self._files.array(name, FLOATS, (self.count, 2 * rows, columns))[expert]
        return both[:rows] if projection == "gate" else both[rows:]

    def matrices(self, expert: int) -> list[object]:
        """bf16 gate, up and down."""
        return [to_bf16(self._array(projection, expert), self._name(projection, expert)) for projection in PROJECTIONS]

    def load(self, layer: "_core.MoELayer", slot: int, expert: int) -> None:
        layer.load_expert(slot, *self.matrices(expert))

    def will_need(self, expert: int) -> None:
        if not self._scheme.packed:
            self._files.will_need(self._name(projection, expert) for projection in PROJECTIONS)

    def forget(self) -> None:
        self._files.forget()

    def __enter__(self) -> "CheckpointExperts":
        return self

    def __exit__(self, *_) -> None:
        self._files.__exit__()


def _find(files: TensorFiles, layer_idx: int) -> tuple[str, Scheme]:
    for base in (base.format(layer=layer_idx) for base in BASES):
        for scheme in SCHEMES:
            if f"{base}.{scheme.gate.format(expert=0)}" in files:
                return base, scheme
    example = f"{BASES[0]}.{SCHEMES[0].gate}".format(layer=layer_idx, expert=0)
    raise MissingTensorError(
        f"{files.path} has no experts of layer {layer_idx} under a known name such as {example!r}; it has "
        f"{layers_in(files)}"
    )
