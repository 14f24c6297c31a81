"""Experts of original checkpoints: in bf16, f16 or f32, or in an encoding, which a layer keeps or gets as bf16."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import count, product
from typing import NamedTuple

import numpy as np

from kt_kernel import _core
from kt_kernel.methods import DECODING, KEPT_FORMATS, methods_of
from kt_kernel.weights import biases, packed, packed_mxfp4
from kt_kernel.weights.config import checkpoint_format_beside
from kt_kernel.weights.encodings import CODES, FLOATS, SUFFIXES, Encoding, Parts, Target, find, name_tensor, open_parts
from kt_kernel.weights.experts import PROJECTIONS, Sizes, count_consecutive, layers_in
from kt_kernel.weights.floats import to_bf16
from kt_kernel.weights.mapped_file import MissingTensorError
from kt_kernel.weights.tensor_files import TensorFiles

# How models call layer {layer}, most frequent first.
BASES = (
    "model.layers.{layer}",
    "language_model.model.layers.{layer}",
    "model.language_model.layers.{layer}",
    "layers.{layer}",
    "thinker.model.layers.{layer}",
    "language.model.layers.{layer}",
)


class Scheme(NamedTuple):
    """Names below a base. With {expert} each expert has its own matrices, in tensors named `matrix.suffix`; else a
    tensor has a matrix of all of them, see packed.py.
    """

    gate: str
    up: str
    down: str

    @property
    def packed(self) -> bool:
        return "{expert}" not in self.gate

    @property
    def joined(self) -> bool:
        return self.gate == self.up

    def matrix(self, projection: str, expert: int) -> str:
        return getattr(self, projection).format(expert=expert)


def _each(block: str, names: Iterable[str]) -> Scheme:
    return Scheme(*(f"{block}.{{expert}}.{name}" for name in names))


def _joined(both: str, down: str) -> Scheme:
    return Scheme(both, both, down)


_LEAST_GROUP = {"nvfp4": 16}  # else 32; groups are multiples of it

_PROJ = [f"{projection}_proj" for projection in PROJECTIONS]
_W132 = ("w1", "w3", "w2")

# A way to name experts is a row, with the models that use it.
SCHEMES = (
    _each("mlp.experts", _PROJ),  # Qwen2/3-MoE, Qwen3-Next, DeepSeek, GLM-4.x, OLMoE, Kimi, Ernie, Hunyuan, dots
    _each("block_sparse_moe.experts", _W132),  # Mixtral, Phi-3.5-MoE, MiniMax
    _each("block_sparse_moe.experts", _PROJ),  # what llmcompressor makes of Mixtral
    _joined("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),  # Qwen3.5; turned: Qwen3-VL
    _joined("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),  # turned: Llama 4
    _joined("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),  # Granite
    _joined("mlp.input_linear.weight", "mlp.output_linear.weight"),  # JetMoE
    _joined("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),  # transformers 5, in memory
    _joined("experts.gate_up_proj", "experts.down_proj"),  # Gemma 4
    _joined("mlp.experts.fc1.weight", "mlp.experts.fc2.weight"),  # turned: Aria
    _each("feed_forward.experts", _PROJ),  # Jamba
    _each("feed_forward.experts", _W132),  # LFM2
    _each("ffn.experts", _W132),  # DeepSeek V4
    _each("experts", _W132),  # Mistral's own files
    Scheme(*(f"moe.{name}.weight" for name in _PROJ)),  # Step 3
)


_BOTH = ("gate", "up")


class CheckpointExperts:
    def __init__(self, files: TensorFiles, layer_idx: int, sizes: Sizes | None = None):
        """Without sizes they are those of the first expert."""
        self._files, self.where = files, f"{files.path} (layer {layer_idx})"
        self._base, self._scheme = _find(files, layer_idx)
        self._mxfp4 = self.biases = False  # experts packed into one tensor may be MXFP4, and may have biases
        if self._scheme.packed:
            self._open_packed()
        else:
            first = self._name("gate", 0)
            self._codes = next(codes for codes in CODES if f"{first}.{codes}" in files)
            self.count = count_consecutive(_has_matrix(files, self._name("gate", expert)) for expert in count())
        self.sizes = sizes or self._sizes_of_first()

    def _open_packed(self) -> None:
        files, joined = self._files, self._scheme.joined
        names = [self._name(projection, 0) for projection in ("gate", "down")]
        self._mxfp4 = names[0] not in files
        if self._mxfp4:
            names = [packed_mxfp4.tensors_of(name)[0] for name in names]
        gate, down = (files.entry(name).shape for name in names)
        self.count = down[0] if down else 0
        bias = biases.first_in(files, self._names(0)) if joined else None
        self.biases = bias is not None
        # MXFP4 under these names is gpt-oss, whose gate and up alternate.
        alternating = self._mxfp4 or (bias is not None and biases.alternate(files, bias))
        self._layout = packed.Layout(joined, joined and packed.is_turned(gate, down), alternating)
        if alternating and not (self._mxfp4 or self._layout.turned):
            raise ValueError(
                f"{self.where}: {names[0]!r} has shape {list(gate)} and {names[1]!r} {list(down)}; needed are "
                "[E, H, 2I] and [E, I, H], as gpt-oss has them"
            )

    @property
    def alternating(self) -> bool:
        """Whether outputs of gate and up alternate in their tensor."""
        return self._scheme.packed and self._layout.alternating

    def _sizes_of_first(self) -> Sizes:
        stem = self._name("down", 0)
        if self._mxfp4:
            return packed_mxfp4.sizes_of(self._files, stem)
        if not self._scheme.packed and (encoding := self._encoding(stem)):
            return Sizes(*encoding.shape(open_parts(self._files, stem, encoding)))
        name = stem if self._scheme.packed else f"{stem}.weight"
        shape = self._files.entry(name).shape
        if len(shape) != (3 if self._scheme.packed else 2):
            raise ValueError(f"{self.where}: {name!r} has shape {list(shape)}; it must be a matrix")
        turned = self._scheme.packed and self._layout.turned
        return Sizes(*(reversed(shape[-2:]) if turned else shape[-2:]))

    def _name(self, projection: str, expert: int) -> str:
        return f"{self._base}.{self._scheme.matrix(projection, expert)}"

    def _names(self, expert: int) -> dict[str, str]:
        return {projection: self._name(projection, expert) for projection in PROJECTIONS}

    @cached_property
    def _said(self) -> str | None:
        return checkpoint_format_beside(self._files.path)

    def _encoding(self, stem: str) -> Encoding | None:
        """Of a matrix that is not packed."""
        return find(self._files, stem, self._said)

    def stored_as(self) -> tuple[str | Encoding, str]:
        """The dtype or encoding of the first expert, and the name of the tensor that says so."""
        name = self._name("gate", 0)
        if self._mxfp4:
            return packed_mxfp4.MXFP4, packed_mxfp4.tensors_of(name)[0]
        if not self._scheme.packed:
            encoding = self._encoding(name)
            if encoding is not None:
                return encoding, f"{name}.{encoding.codes}"
            name = f"{name}.{self._codes}"
        return self._files.entry(name).dtype, name

    def layout_for(self, formats: Sequence[str]) -> Target | None:
        """The first of these formats that holds the first expert as it is, with its group size; None: no such encoding.

        If none holds it the first, so that a load says why.
        """
        stored, _ = self.stored_as()
        if not isinstance(stored, Encoding) or formats[0] not in stored.formats:
            return None
        found = [(self._parts(projection, 0), self.sizes.shape(projection)) for projection in PROJECTIONS]
        # The only group of a matrix may be larger: then another matrix tells the size.
        group = max(encoding.group(parts, shape) for (encoding, parts), shape in found)
        if group % _LEAST_GROUP.get(formats[0], 32):
            return None
        for weight_format in formats:
            with suppress(ValueError):
                for (encoding, parts), shape in found:
                    encoding.native(parts, shape, Target(weight_format, group))
                return Target(weight_format, group)
        return Target(formats[0], group)

    def _parts(self, projection: str, expert: int) -> tuple[Encoding, Parts]:
        """A matrix that some layer keeps as it is."""
        name = self._name(projection, expert)
        if self._mxfp4:
            parts = packed_mxfp4.parts(self._files, name, projection, self.sizes, self.count, expert)
            return packed_mxfp4.MXFP4, parts
        encoding = None if self._scheme.packed else self._encoding(name)
        if encoding is None:
            if not self._scheme.packed:
                name = f"{name}.{'weight' if _has_matrix(self._files, name) else self._codes}"
            dtype = self._files.entry(name).dtype
            raise ValueError(
                f"{self._files.file_of(name)}: tensor {name!r} is {dtype}, in no encoding that this layer could keep: "
                "use method='BF16', 'AMXINT8', 'AMXINT4' or 'INT4G'"
            )
        return encoding, open_parts(self._files, name, encoding)

    def _array(self, projection: str, expert: int) -> np.ndarray:
        name = self._name(projection, expert)
        if self._mxfp4:
            return packed_mxfp4.read(self._files, name, projection, self.sizes, self.count, expert)
        if self._scheme.packed:
            return packed.read(self._files, name, FLOATS, projection, self.sizes, self.count, expert, self._layout)
        shape, encoding = self.sizes.shape(projection), self._encoding(name)
        if encoding is None:
            missing = not _has_matrix(self._files, name)  # then the message names what other experts have
            return self._files.array(f"{name}.{self._codes if missing else 'weight'}", FLOATS, shape)
        return encoding.decode(open_parts(self._files, name, encoding), shape)

    def matrices(self, expert: int) -> list[object]:
        """bf16 gate, up and down."""
        return [to_bf16(self._array(projection, expert), self._name(projection, expert)) for projection in PROJECTIONS]

    def load(self, layer: "_core.MoELayer", slot: int, expert: int) -> None:
        if layer.format in KEPT_FORMATS:
            self._load_as_it_is(layer, slot, expert)
        else:
            layer.load_expert(slot, *self.matrices(expert))
        if self.biases:
            layer.load_biases(slot, *self.bias_vectors(expert))

    def bias_vectors(self, expert: int) -> list[np.ndarray]:
        """f32 gate, up and down, of experts that have biases."""
        order, names = self._layout.alternating, self._names(expert)
        return biases.read(self._files, names, self.sizes, self.count, expert, order)

    def _load_as_it_is(self, layer: "_core.MoELayer", slot: int, expert: int) -> None:
        target = Target(layer.format, layer.group_size)
        # down sorts its columns where gate and up have rows, so that nothing is left to do at run time.
        down, rows = self._as_it_is("down", expert, target)
        (gate, columns), (up, other) = (self._as_it_is(projection, expert, target, rows) for projection in _BOTH)
        if not np.array_equal(columns, other):
            raise ValueError(
                f"{self.where}: gate and up of expert {expert} have columns in different orders (act-order), which "
                f"{layer.format} does not keep: use {DECODING}"
            )
        try:
            layer.load_encoded(slot, gate, up, down, columns)
        except ValueError as error:
            parts = {projection: self._parts(projection, expert)[1] for projection in PROJECTIONS}
            raise ValueError(name_tensor(str(error), parts)) from None

    def _as_it_is(
        self, projection: str, expert: int, target: Target, rows: np.ndarray | None = None
    ) -> "tuple[_core.EncodedMatrix, np.ndarray | None]":
        """A matrix with its rows in this order, and the order of its columns."""
        encoding, parts = self._parts(projection, expert)
        if target.format not in encoding.formats:
            raise ValueError(
                f"{parts[encoding.codes].where} is in {encoding.name}, but this layer keeps {target.format} (method "
                f"{' or '.join(methods_of(target.format))}): use method={encoding.method!r}, or {DECODING}"
            )
        shape = self.sizes.shape(projection)
        ordered = {} if rows is None else {"rows_in_order": rows}
        return encoding.native(parts, shape, target, **ordered), encoding.order(parts, shape)

    def check(self, layer: "_core.MoELayer", experts: Iterable[int]) -> None:
        """What headers tell about all that these experts need, before any of it is loaded."""
        if self._scheme.packed:
            return
        kept, good = layer.format in KEPT_FORMATS, {}
        for expert, projection in product(experts, PROJECTIONS):
            name = self._name(projection, expert)
            encoding = self._encoding(name)
            suffixes = encoding.needed if encoding else ["weight" if _has_matrix(self._files, name) else self._codes]
            found = encoding, *(self._files.entry(f"{name}.{suffix}")[:2] for suffix in suffixes)
            if kept and good.get(projection) != found:
                self._as_it_is(projection, expert, Target(layer.format, layer.group_size))
                good[projection] = found

    def will_need(self, expert: int) -> None:
        stems = dict.fromkeys(self._name(projection, expert) for projection in PROJECTIONS)
        if self._mxfp4:
            self._files.will_need((name for stem in stems for name in packed_mxfp4.tensors_of(stem)), expert)
        elif self._scheme.packed:
            self._files.will_need(stems, expert)
        else:
            self._files.will_need(f"{stem}.{suffix}" for stem in stems for suffix in SUFFIXES)

    def forget(self) -> None:
        self._files.forget()

    def __enter__(self) -> "CheckpointExperts":
        return self

    def __exit__(self, *_) -> None:
        self._files.__exit__()


def _has_matrix(files: TensorFiles, stem: str) -> bool:
    return any(f"{stem}.{codes}" in files for codes in CODES)


def _has_packed(files: TensorFiles, name: str) -> bool:
    return name in files or packed_mxfp4.tensors_of(name)[0] in files


def _find(files: TensorFiles, layer_idx: int) -> tuple[str, Scheme]:
    for base in (base.format(layer=layer_idx) for base in BASES):
        for scheme in SCHEMES:
            _refuse_biases(files, base, scheme)
            name = f"{base}.{scheme.matrix('gate', 0)}"
            if _has_packed(files, name) if scheme.packed else _has_matrix(files, name):
                return base, scheme
    example = f"{BASES[0].format(layer=layer_idx)}.{SCHEMES[0].matrix('gate', 0)}.weight"
    raise MissingTensorError(
        f"{files.path} has no experts of layer {layer_idx} under a known name such as {example!r}; it has "
        f"{layers_in(files)}"
    )


def has_biases(files: TensorFiles, layer_idx: int) -> bool:
    """Whether the experts of a layer have biases that biases.py reads."""
    return any(
        biases.bias_of(f"{base.format(layer=layer_idx)}.{scheme.down}") in files
        for base in BASES
        for scheme in SCHEMES
        if scheme.packed
    )


def _refuse_biases(files: TensorFiles, base: str, scheme: Scheme) -> None:
    """Those that biases.py does not read."""
    for name in (f"{base}.{scheme.matrix(projection, 0)}" for projection in PROJECTIONS):
        if scheme.packed and scheme.joined and not name.endswith(".weight"):
            continue
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in files:
            raise ValueError(
                f"{files.path}: the experts have biases ({bias!r}); biases are read under the names of gpt-oss only, "
                "and without them the results would be wrong"
            )
