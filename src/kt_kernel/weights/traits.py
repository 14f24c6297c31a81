"""What a layer must be made with, so that the experts of a checkpoint compute in it what they do in their model."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kt_kernel.methods import GROUP_SIZES, LLAMAFILE, format_of, formats_of
from kt_kernel.weights import canonical
from kt_kernel.weights.checkpoint import CheckpointExperts, has_biases
from kt_kernel.weights.config import GELU_TANH, SWIGLUOAI, SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT, activation_beside
from kt_kernel.weights.detect import Kind, locate
from kt_kernel.weights.encodings import Target
from kt_kernel.weights.experts import Sizes
from kt_kernel.weights.gguf_config import activation_of
from kt_kernel.weights.gguf_experts import GgufExperts, has_gguf_biases
from kt_kernel.weights.gguf_files import GgufFiles

# Formats of GGUF files that checkpoints have too, with groups of this size.
_GROUPS = {"mxfp4": 32}


class Traits(NamedTuple):
    """Arguments of KTMoEWrapper. No activation: what the arguments say."""

    biases: bool = False
    activation: str | None = None
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0


def find_traits(path: str | os.PathLike[str], layer_idx: int, method: str | None = None) -> Traits:
    """From names and config.json. Where nothing can be read there are none: a load says why."""
    path = Path(path)
    with suppress(OSError, ValueError):
        kind, source = locate(path, layer_idx, method)
        if kind is Kind.GGUF:
            with source:
                return _gguf_traits(source, layer_idx)
        if kind not in (Kind.CHECKPOINT, Kind.CANONICAL):
            return Traits()
        with source:
            biases = (canonical.has_biases if kind is Kind.CANONICAL else has_biases)(source, layer_idx)
        activation = activation_beside(path)
        if biases and activation[0] != SWIGLUOAI:  # no config.json: as gpt-oss, see biases.py
            activation = SWIGLUOAI, SWIGLUOAI_LIMIT, SWIGLUOAI_ALPHA
        return Traits(biases, *activation) if activation[0] in (SWIGLUOAI, GELU_TANH) else Traits()
    return Traits()


def _gguf_traits(files: GgufFiles, layer_idx: int) -> Traits:
    activation, limit, alpha = activation_of(files, layer_idx)
    named = activation if activation in (SWIGLUOAI, GELU_TANH) else None
    return Traits(has_gguf_biases(files, layer_idx), named, limit, alpha)


def choose_traits(
    path: str,
    layer_idx: int,
    biases: bool | None,
    activation: str | None,
    limit: float,
    alpha: float,
    method: str | None = None,
) -> Traits:
    """What the arguments of KTMoEWrapper ask for, and where they leave it open, what `path` holds."""
    found = find_traits(path, layer_idx, method) if path else Traits()
    if activation is None and not limit and not alpha:
        _, activation, limit, alpha = found
    if activation == SWIGLUOAI:
        limit, alpha = limit or SWIGLUOAI_LIMIT, alpha or SWIGLUOAI_ALPHA
    return Traits(found.biases if biases is None else bool(biases), activation, limit, alpha)


def choose_format(
    method: str, path: str | os.PathLike[str], layer_idx: int, hidden_size: int, intermediate_size: int
) -> Target:
    """Format and group size of a layer: of methods that keep codes as the first expert has them.

    Where nothing can be read, or does not fit the method, they are the usual ones: a load says why. LLAMAFILE has no
    usual ones, and the file must be there.
    """
    if method == LLAMAFILE:
        return _gguf_format(path, layer_idx, hidden_size, intermediate_size)
    if method in GROUP_SIZES and path:
        with suppress(OSError, ValueError, KeyError):
            kind, source = locate(Path(path), layer_idx)
            if kind is Kind.CHECKPOINT:
                with source:
                    experts = CheckpointExperts(source, layer_idx, Sizes(hidden_size, intermediate_size))
                    if (found := experts.layout_for(formats_of(method))) is not None:
                        return found
    return Target(format_of(method), GROUP_SIZES.get(method, 0))


def _gguf_format(path: str | os.PathLike[str], layer_idx: int, hidden_size: int, intermediate_size: int) -> Target:
    if not path:
        raise ValueError(f"method={LLAMAFILE!r} needs weight_path, a GGUF file or a folder of them; it was not given")
    _, files = locate(Path(path), layer_idx, LLAMAFILE)
    with files:
        name = GgufExperts(files, layer_idx, Sizes(hidden_size, intermediate_size)).format
    return Target(name, _GROUPS.get(name, 0))
