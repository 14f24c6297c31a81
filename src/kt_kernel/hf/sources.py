"""Where the experts of a module come from.

files         our own loader, from the mapped files: transformers never touches their bytes. Only where transformers'
              conversion mapping makes this module of the names that it reads.
tensors       transformers renames and merges, we pack each finished tensor and drop it
transformers  stays with transformers: our kernels do not compute it
"""

import logging
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from kt_kernel.hf.experts import ExpertsModule
from kt_kernel.weights.checkpoint import CheckpointExperts
from kt_kernel.weights.detect import Kind, locate
from kt_kernel.weights.encodings import CODES
from kt_kernel.weights.mapped_file import MissingTensorError
from kt_kernel.weights.packed_mxfp4 import tensors_of

_LOG = logging.getLogger("kt_kernel.hf")

# What our loader does too, told by names and shapes; another operation changes the weights.
_REPRODUCED = (MergeModulelist, Concatenate, Transpose)


class Way(Enum):
    FILES = "files"
    TENSORS = "tensors"
    TRANSFORMERS = "transformers"


@dataclass
class Choice:
    way: Way
    reason: str | None = None  # why it is not the way before


class KeyMap:
    """The parameter that transformers makes of a tensor of a checkpoint, and by which converter."""

    def __init__(self, model: nn.Module):
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._prefix, self._state = model.base_model_prefix, model.state_dict()

    def renamed(self, key: str) -> str:
        """As converters see it."""
        for renaming in self._renamings:
            key, _ = renaming.rename_source_key(key)
        return key

    def leads_to_parameter(self, key: str) -> bool:
        return self.target(key)[0] in self._state

    def target(self, key: str) -> tuple[str, WeightConverter | None]:
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._state)
        return name, None if pattern is None else self._by_pattern[pattern]


def choose(found: ExpertsModule, path: Path | None, keys: KeyMap, given: bool) -> Choice:
    """`path`: folder or file of the experts, None if transformers alone can read it. `given`: the user named it."""
    if found.refusal:
        return Choice(Way.TRANSFORMERS, found.refusal)
    reason = "the checkpoint is not in safetensors" if path is None else _objection(found, path, keys)
    if reason is None:
        return Choice(Way.FILES)
    if given:
        raise ValueError(
            f"weight_path {path} cannot fill {found.name}: {reason}. Leave weight_path out to take the experts "
            "from the checkpoint"
        )
    return Choice(Way.TENSORS, reason)


def _objection(found: ExpertsModule, path: Path, keys: KeyMap) -> str | None:
    """Why our loader cannot fill the module from there."""
    if not found.activation.gated:
        return "experts without gates are read by transformers only"
    try:
        kind, source = locate(path, found.layer_idx)
        if kind is not Kind.CHECKPOINT:  # made of a checkpoint, by layer
            return None
        with source:
            experts = CheckpointExperts(source, found.layer_idx)
            return _mismatch(found, experts) or _misnamed(found, experts, keys)
    except (MissingTensorError, ValueError) as error:
        _LOG.debug("%s: %s", found.name, error)
        return "its names or shapes are not known to our loader"


def _mismatch(found: ExpertsModule, experts: CheckpointExperts) -> str | None:
    there = (experts.count, *experts.sizes, experts.biases)
    needed = (found.num_experts, found.hidden, found.intermediate, found.module.has_bias)
    if there == needed:
        return None
    names = ("experts", "hidden size", "intermediate size", "biases")
    wrong = [f"{name} {a} instead of {b}" for name, a, b in zip(names, there, needed, strict=True) if a != b]
    return f"it has {', '.join(wrong)} in layer {found.layer_idx}"


def _misnamed(found: ExpertsModule, experts: CheckpointExperts, keys: KeyMap) -> str | None:
    _, tensor = experts.stored_as()
    target, converter = keys.target(_as_unquantised(tensor))
    # Experts by themselves, as llmcompressor saves those of every family: transformers does not know all, we do.
    by_itself = converter is None and re.fullmatch(rf"{re.escape(found.name)}\.\d+\.\w+\.weight", target)
    if not by_itself and target != f"{found.name}.{found.first}":
        return f"{tensor!r} belongs to {target!r}"
    operations = [] if converter is None else converter.operations
    if others := [type(op).__name__ for op in operations if not isinstance(op, _REPRODUCED)]:
        return f"transformers changes its weights by {', '.join(others)}"
    if experts.alternating != found.activation.alternating:
        return "gates and ups lie in another order"
    return None


def _as_unquantised(tensor: str) -> str:
    """The name that the tensor of codes would have, had the matrix not been quantised."""
    stem, _, suffix = tensor.rpartition(".")
    if suffix in CODES:
        return f"{stem}.weight"
    return tensor.removesuffix(tensors_of("")[0])
