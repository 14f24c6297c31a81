"""Fills layers with experts, and converts them to files.

Physical slot p of a layer gets logical expert physical_to_logical[p]. Files hold logical experts, so the map is applied
at load only.
"""

import operator
import os
from collections.abc import Iterable
from pathlib import Path

from kt_kernel import _core
from kt_kernel.methods import KEPT_FORMATS, LLAMAFILE, fits, format_of
from kt_kernel.weights.canonical import CanonicalExperts, Coded
from kt_kernel.weights.checkpoint import CheckpointExperts
from kt_kernel.weights.converting import convert_layer
from kt_kernel.weights.detect import Kind, Source, holds_only_gguf, locate
from kt_kernel.weights.experts import Experts, Sizes
from kt_kernel.weights.gguf_experts import GgufExperts
from kt_kernel.weights.progress import Progress, Report
from kt_kernel.weights.released import MergedExperts, ReleasedExperts, TreeExperts, check_layout
from kt_kernel.weights.store import StoredLayer
from kt_kernel.weights.tensor_files import TensorFiles
from kt_kernel.weights.tensors import TensorExperts

StrPath = str | os.PathLike[str]


def load_layer(
    layer: "_core.MoELayer",
    method: str,
    path: StrPath,
    layer_idx: int,
    physical_to_logical: Iterable[int] | None = None,
    skip: Iterable[bool] | None = None,
    progress: Report | None = None,
    store: StrPath | None = None,
) -> None:
    """Loads the experts of a layer from a folder or a file.

    `path` holds converted weights (ours, or of kt-kernel 0.4 to 0.7), which are loaded as they are, or an original
    checkpoint: bf16, f16 or f32, quantised for methods that quantise, or one of the encodings, which the methods named
    after encodings keep as it is and others get as bf16; or GGUF files, for method LLAMAFILE, which keeps their types.
    Without a map slot p gets expert p.
    Slots with skip[p] are left as they are. `progress(done, total)` replaces the bar that a terminal gets after a
    second. `store` is a folder that keeps the packed experts for the next load; see store.py.
    """
    _check_format(layer, method)
    kind, source = locate(Path(path), layer_idx, method)
    with open_experts(kind, source, layer_idx, layer.format, Sizes.of(layer)) as experts:
        _check_biases(layer, experts)
        if isinstance(experts, ReleasedExperts):
            check_layout(experts.where, method)
        slots = _slots(layer, experts, physical_to_logical, skip)
        kept = None if store is None else StoredLayer(Path(store), layer, Path(path), layer_idx, source, experts.count)
        if kept is not None and kept.read(slots, progress):
            return
        order = sorted(slots)  # as files have them
        if isinstance(experts, CheckpointExperts):
            experts.check(layer, order)
        with Progress(f"layer {layer_idx}", sum(map(len, slots.values())), progress) as bar:
            for position, expert in enumerate(order):
                if position + 1 < len(order):
                    experts.will_need(order[position + 1])
                for slot in slots[expert]:
                    experts.load(layer, slot, expert)
                    bar.advance()
                experts.forget()
    if kept is not None and not layer.has_columns:  # packed files have no place for orders of columns
        kept.write(slots, progress)


def load_layer_from_tensors(
    layer: "_core.MoELayer",
    method: str,
    gate: object,
    up: object,
    down: object,
    physical_to_logical: Iterable[int] | None = None,
    skip: Iterable[bool] | None = None,
    save_to: StrPath | None = None,
    layer_idx: int | None = None,
    progress: Report | None = None,
    biases: tuple[object, object, object] | None = None,
) -> Path | None:
    """Loads the experts of a layer from gate and up [E, I, H] and down [E, H, I] in memory.

    A layer that has them also needs biases: [E, I], [E, I] and [E, H].
    Tensors of torch on the CPU or of numpy, in bf16, f16 or f32. With `save_to` the experts are also written there, for
    load_layer, and the layer gets exactly what the file holds; returns the file. On several nodes a layer that is not
    saved differs from it a little: each node then scales its part of down by itself.
    """
    _check_format(layer, method)
    if method == LLAMAFILE or layer.format in KEPT_FORMATS:
        what = "the types of a GGUF file" if method == LLAMAFILE else "the codes of a checkpoint"
        raise ValueError(
            f"method {method} keeps {what}, which load_weights() reads; tensors need method='BF16', "
            "'AMXINT8', 'AMXINT4' or 'INT4G'"
        )
    experts = TensorExperts(gate, up, down, Sizes.of(layer), biases)
    _check_biases(layer, experts)
    slots = _slots(layer, experts, physical_to_logical, skip)
    if save_to is None:
        with Progress("experts", sum(map(len, slots.values())), progress) as bar:
            for expert, slots_of_expert in sorted(slots.items()):
                for slot in slots_of_expert:
                    experts.load(layer, slot, expert)
                    bar.advance()
        return None
    if layer_idx is None:
        raise ValueError("save_to needs layer_idx: files are named after it")

    def keep(expert: int, coded: list[Coded]) -> None:
        for slot in slots.get(expert, ()):
            layer.load_codes(slot, *([projection] for projection in coded))
            if experts.biases:
                layer.load_biases(slot, *experts.bias_vectors(expert))

    return convert_layer(
        experts, method, Path(save_to), layer_idx, pool=layer.pool, progress=progress, finished=keep
    ).path


def save_layer(
    pool: "_core.Pool",
    method: str,
    path: StrPath,
    layer_idx: int,
    save_to: StrPath,
    progress: Report | None = None,
) -> Path:
    """Converts the experts of a layer of a checkpoint, plain or encoded, and writes them into the folder `save_to`."""
    if holds_only_gguf(Path(path)):
        raise ValueError(f"{path} holds GGUF files: method {LLAMAFILE} loads them as they are, none can be converted")
    with CheckpointExperts(TensorFiles(Path(path)), layer_idx) as experts:
        return convert_layer(
            experts,
            method,
            Path(save_to),
            layer_idx,
            threads=pool.threads,
            progress=progress,
        ).path


def _check_format(layer: "_core.MoELayer", method: str) -> None:
    if not fits(method, layer.format):
        needed = "a type of GGUF files" if method == LLAMAFILE else format_of(method)
        raise ValueError(f"method {method} needs a layer of {needed}; this one is {layer.format}")


def _check_biases(layer: "_core.MoELayer", experts: Experts) -> None:
    if experts.biases and not layer.biases:
        raise ValueError(
            f"{experts.where}: the experts have biases, and this layer was made without: make it with biases=True and "
            "the activation of the model (KTMoEWrapper does so if the weights are there when it is made)"
        )
    if layer.biases and not experts.biases:
        raise ValueError(f"{experts.where}: the experts have no biases, which this layer needs: it has biases=True")


def open_experts(kind: Kind, source: Source, layer_idx: int, weight_format: str, sizes: Sizes) -> Experts:
    """What `locate` found, for a layer of this format. A context manager."""
    if kind is Kind.GGUF:
        return GgufExperts(source, layer_idx, sizes, weight_format)
    if kind is Kind.TREE:
        return TreeExperts(source, layer_idx, weight_format, sizes)
    if kind is Kind.MERGED:
        return MergedExperts(source, layer_idx, weight_format, sizes)
    if kind is Kind.CANONICAL:
        return CanonicalExperts(source, layer_idx, weight_format, sizes)
    return CheckpointExperts(source, layer_idx, sizes)


def _slots(layer, experts: Experts, physical_to_logical, skip) -> dict[int, list[int]]:
    """Logical expert -> the physical slots that want it."""
    total = layer.num_experts
    if experts.count > total:
        raise ValueError(f"{experts.where} has {experts.count} experts; this layer was made for {total}")
    logical = [*range(total)] if physical_to_logical is None else _integers(physical_to_logical)
    skipped = [False] * total if skip is None else [bool(flag) for flag in skip]
    for name, values in (("physical_to_logical_map", logical), ("skip", skipped)):
        if len(values) != total:
            raise ValueError(f"{name} has {len(values)} entries; this layer has {total} experts")
    slots: dict[int, list[int]] = {}
    for slot, expert in enumerate(logical):
        if not 0 <= expert < experts.count:
            raise ValueError(
                f"physical_to_logical_map[{slot}] is {expert}; {experts.where} has {experts.count} experts, 0.."
                f"{experts.count - 1}"
            )
        if not skipped[slot]:
            slots.setdefault(expert, []).append(slot)
    return slots


def _integers(values: Iterable[int]) -> list[int]:
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise TypeError("physical_to_logical_map must hold integers") from None
