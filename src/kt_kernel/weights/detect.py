"""Tells what a folder of weights holds, from names and headers only."""

import os
import re
from enum import Enum
from pathlib import Path

from kt_kernel.methods import LLAMAFILE, METHODS, NAMES, method_of
from kt_kernel.weights.canonical import file_name, stored_format, tensor_name
from kt_kernel.weights.checkpoint import CheckpointExperts
from kt_kernel.weights.encodings import FLOATS, Encoding
from kt_kernel.weights.experts import Sizes, layers_in
from kt_kernel.weights.gguf_files import GgufFiles, holds_gguf
from kt_kernel.weights.mapped_file import MissingTensorError
from kt_kernel.weights.released import MergedExperts, TreeExperts
from kt_kernel.weights.tensor_files import TensorFiles


class Kind(Enum):
    TREE = "a tree of .kt files"
    MERGED = "weights that kt-kernel 0.4 to 0.7 converted"
    CANONICAL = "weights that kt-kernel converted"
    GGUF = "GGUF files"
    CHECKPOINT = "a checkpoint"


Source = Path | TensorFiles | GgufFiles


_NOT_GGUF = ("*.safetensors", "_layer_*")


def holds_only_gguf(path: Path) -> bool:
    return holds_gguf(path) and not (path.is_dir() and any(any(path.glob(name)) for name in _NOT_GGUF))


def locate(path: Path, layer_idx: int, method: str | None = None) -> tuple[Kind, Source]:
    """Where the experts of a layer are: the folder of a tree, or files with tensors. Of both kinds in one folder the
    method takes its own; a method that cannot take what is there is an error.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"weight_path {path} does not exist; it is a folder of weights, or one safetensors or GGUF file"
        )
    if holds_gguf(path) if method == LLAMAFILE else holds_only_gguf(path):
        if method not in (LLAMAFILE, None):
            raise ValueError(
                f"{path} holds GGUF files, which method {method} does not read: use method={LLAMAFILE!r}, which keeps "
                "them as they are, or a safetensors checkpoint of the model"
            )
        return Kind.GGUF, GgufFiles(path)
    if method == LLAMAFILE:
        raise ValueError(
            f"method {LLAMAFILE} reads GGUF files, and {path} {'has' if path.is_dir() else 'is'} none: use another "
            "method, or method='auto'"
        )
    if (path / file_name(layer_idx)).exists():
        path = path / file_name(layer_idx)  # needs no look at the other layers
    if path.is_dir() and not any(path.glob("*.safetensors")) and any(path.glob("_layer_*")):
        return Kind.TREE, path
    files = TensorFiles(path)
    merged, canonical = (tensor_name(layer_idx, "gate", 0, kind) for kind in ("numa.0.weight", "weight"))
    if merged in files:
        return Kind.MERGED, files
    return Kind.CANONICAL if canonical in files else Kind.CHECKPOINT, files


def find_method(path: str | os.PathLike[str], layer_idx: int, hidden_size: int, intermediate_size: int) -> str:
    """The method that loads the experts of a layer as they are stored."""
    path, sizes = Path(path), Sizes(hidden_size, intermediate_size)
    if path.is_dir() and not any(any(path.glob(name)) for name in (*_NOT_GGUF, "*.gguf", "*.GGUF")):
        others = sorted({file.suffix for file in path.iterdir() if file.suffix})
        raise _unknown(
            f"{path} has no *.safetensors, no *.gguf and no _layer_* folders; it has {', '.join(others) or 'nothing'}"
        )
    kind, source = locate(path, layer_idx)
    if kind is Kind.GGUF:
        return LLAMAFILE
    if kind is Kind.TREE:
        found = TreeExperts.formats_in(source, layer_idx)
        if len(found) != 1:
            raise _unknown(f"{source} has {' and '.join(sorted(found)) or 'no weights'} of layer {layer_idx}")
        return method_of(found.pop())
    with source:
        if kind is Kind.MERGED:
            return method_of(MergedExperts(source, layer_idx, None, sizes).format)
        if kind is Kind.CANONICAL:
            name = stored_format(source, layer_idx)
            if name not in METHODS.values():
                raise _unknown(f"{source.path} has weights in {name}")
            return method_of(name)
        return _checkpoint_method(source, layer_idx, sizes)


def _checkpoint_method(files: TensorFiles, layer_idx: int, sizes: Sizes) -> str:
    try:
        stored, name = CheckpointExperts(files, layer_idx, sizes).stored_as()
    except MissingTensorError:
        raise _unknown(_what_is_there(files, layer_idx)) from None
    if isinstance(stored, Encoding):
        return stored.method
    if stored not in FLOATS:
        raise _unknown(f"{files.path} has {name!r} in {stored}")
    return method_of("bf16")


def _what_is_there(files: TensorFiles, layer_idx: int) -> str:
    mine = [name for name in files if re.search(rf"(?:layers|blk)\.{layer_idx}\..*exp", name)]
    if not mine:
        return f"{files.path} has no experts of layer {layer_idx} under a known name; it has {layers_in(files)}"
    dtype = files.entry(mine[0]).dtype
    return f"{files.path} has experts under names that are not known, such as {mine[0]!r} ({dtype})"


def _unknown(found: str) -> ValueError:
    return ValueError(f"method='auto': {found}. No method fits; the methods are {', '.join(NAMES)}")
