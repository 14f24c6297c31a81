"""Experts of original checkpoints: in bf16, f16 or f32, or in one of the encodings, which are decoded to bf16."""

from itertools import count
from typing import NamedTuple

import numpy as np

from kt_kernel import _core
from kt_kernel.weights.encodings import CODES, FLOATS, SUFFIXES, find, open_parts
from kt_kernel.weights.experts import PROJECTIONS, Sizes, count_consecutive, layers_in
from kt_kernel.weights.floats import to_bf16
from kt_kernel.weights.tensor_files import MissingTensorError, TensorFiles

# How models call layer {layer}, most frequent first.
BASES = (
    "model.layers.{layer}",
    "language_model.model.layers.{layer}",
    "model.language_model.layers.{layer}",
    "layers.{layer}",
)


class Scheme(NamedTuple):
    """Tensor names below a base. With {expert} each expert has its own matrices, in tensors named `matrix.suffix`; else
    all are in one tensor, with gate above up.
    """

    gate: str
    up: str
    down: str

    @property
    def packed(self) -> bool:
        return self.gate == self.up


# A family of models is a row.
SCHEMES = (
    Scheme(*(f"mlp.experts.{{expert}}.{p}_proj" for p in PROJECTIONS)),
    Scheme(*(f"block_sparse_moe.experts.{{expert}}.{w}" for w in ("w1", "w3", "w2"))),
    Scheme(*(f"ffn.experts.{{expert}}.{w}" for w in ("w1", "w3", "w2"))),
    Scheme(*(f"experts.{{expert}}.{w}" for w in ("w1", "w3", "w2"))),
    Scheme("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)


class CheckpointExperts:
    def __init__(self, files: TensorFiles, layer_idx: int, sizes: Sizes | None = None):
        """Without sizes they are those of the first expert."""
        self._files, self.where = files, f"{files.path} (layer {layer_idx})"
        self._base, self._scheme = _find(files, layer_idx)
        if self._scheme.packed:
            first = files.entry(self._name("down", 0)).shape
            self.count = first[0] if first else 0
        else:
            first = self._name("gate", 0)
            self._codes = next(codes for codes in CODES if f"{first}.{codes}" in files)
            self.count = count_consecutive(_has_matrix(files, self._name("gate", expert)) for expert in count())
        self.sizes = sizes or self._sizes_of_first()

    def _sizes_of_first(self) -> Sizes:
        stem = self._name("down", 0)
        if not self._scheme.packed and (encoding := find(self._files, stem)):
            return Sizes(*encoding.shape(open_parts(self._files, stem, encoding)))
        name = stem if self._scheme.packed else f"{stem}.weight"
        shape = self._files.entry(name).shape
        if len(shape) != (3 if self._scheme.packed else 2):
            raise ValueError(f"{self.where}: {name!r} has shape {list(shape)}; it must be a matrix")
        return Sizes(*shape[-2:])

    def _name(self, projection: str, expert: int) -> str:
        return f"{self._base}.{getattr(self._scheme, projection).format(expert=expert)}"

    def _array(self, projection: str, expert: int) -> np.ndarray:
        name, (rows, columns) = self._name(projection, expert), self.sizes.shape(projection)
        if not self._scheme.packed:
            encoding = find(self._files, name)
            if encoding is None:
                missing = not _has_matrix(self._files, name)  # then the message names what other experts have
                return self._files.array(f"{name}.{self._codes if missing else 'weight'}", FLOATS, (rows, columns))
            return encoding.decode(open_parts(self._files, name, encoding), (rows, columns))
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
            stems = [self._name(projection, expert) for projection in PROJECTIONS]
            self._files.will_need(f"{stem}.{suffix}" for stem in stems for suffix in SUFFIXES)

    def forget(self) -> None:
        self._files.forget()

    def __enter__(self) -> "CheckpointExperts":
        return self

    def __exit__(self, *_) -> None:
        self._files.__exit__()


def _has_matrix(files: TensorFiles, stem: str) -> bool:
    return any(f"{stem}.{codes}" in files for codes in CODES)


def _find(files: TensorFiles, layer_idx: int) -> tuple[str, Scheme]:
    for base in (base.format(layer=layer_idx) for base in BASES):
        for scheme in SCHEMES:
            name = f"{base}.{scheme.gate.format(expert=0)}"
            if name in files if scheme.packed else _has_matrix(files, name):
                return base, scheme
    example = f"{BASES[0]}.{SCHEMES[0].gate}.weight".format(layer=layer_idx, expert=0)
    raise MissingTensorError(
        f"{files.path} has no experts of layer {layer_idx} under a known name such as {example!r}; it has "
        f"{layers_in(files)}"
    )
