"""What is to be converted: the layers of a checkpoint that have experts, found and checked by headers only."""

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kt_kernel.convert.errors import ConvertError
from kt_kernel.weights.checkpoint import CheckpointExperts
from kt_kernel.weights.config import ModelConfig, model_config
from kt_kernel.weights.detect import Kind, locate
from kt_kernel.weights.encodings import Encoding
from kt_kernel.weights.experts import Sizes
from kt_kernel.weights.mapped_file import MissingTensorError
from kt_kernel.weights.tensor_files import TensorFiles

_EXPERTS_OF_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\..*(?:exp|moe|_linear)")

# What --input-type calls the ways in which checkpoints store weights: a dtype, or the method that keeps an encoding.
INPUT_TYPES = {
    "bf16": ("BF16",),
    "fp16": ("F16",),
    "fp32": ("F32",),
    "fp8": ("FP8", "FP8_PERCHANNEL", "MXFP8"),
    "awq": ("AWQ",),
    "gptq": ("GPTQ_INT4",),
    "mxfp4": ("MXFP4",),
    "nvfp4": ("NVFP4",),
    "rawint4": ("RAWINT4",),
}


class SourceLayer(NamedTuple):
    index: int
    experts: int
    sizes: Sizes
    biases: bool
    files: tuple[Path, ...]  # that hold something of its experts


class Source(NamedTuple):
    path: Path
    layers: list[SourceLayer]
    left_out: list[int]  # layers with experts that the model does not count, as those that predict further tokens
    input_type: str  # a key of INPUT_TYPES, or how the checkpoint calls it
    config: ModelConfig | None

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent


def open_source(path: Path) -> Source:
    """Headers of all experts are looked at, so that a file that is missing or cut short shows now, not in an hour."""
    _refuse_gguf(path)
    files = TensorFiles(path)
    with files:
        names = _names_by_layer(files)
        if names:
            _refuse_converted(path, min(names))
        layers = {index: _open_layer(files, index, names[index]) for index in sorted(names)}
        found = [layer for layer in layers.values() if layer is not None]
        if not found:
            raise ConvertError(f"{path} has no experts under a known name; is it a Mixture-of-Experts model?")
        config = _config(path)
        _check_counts(path, found, config)
        wanted = [layer for layer in found if config is None or layer.index < config.num_layers]
        if not wanted:
            raise ConvertError(f"{path}: config.json counts {config.num_layers} layers, and none of them has experts")
        left_out = [layer.index for layer in found if layer not in wanted]
        return Source(path, wanted, left_out, _input_type(files, wanted[0].index), config)


def _refuse_gguf(path: Path) -> None:
    if path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))):
        raise ConvertError(f"{path} is GGUF, which is quantised for the CPU already; nothing has to be converted")
    if path.is_dir() and not any(path.glob("*.safetensors")) and any(path.glob("_layer_*")):
        raise _converted(path, Kind.TREE)


def _names_by_layer(files: TensorFiles) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name in files:
        if match := _EXPERTS_OF_LAYER.search(name):
            names.setdefault(int(match[1]), []).append(name)
    return names


def _refuse_converted(path: Path, layer_idx: int) -> None:
    kind, _ = locate(path, layer_idx)
    if kind is not Kind.CHECKPOINT:
        raise _converted(path, kind)


def _converted(path: Path, kind: Kind) -> ConvertError:
    return ConvertError(f"{path} holds {kind.value}; convert the original model")


def _open_layer(files: TensorFiles, index: int, names: list[str]) -> SourceLayer | None:
    try:
        experts = CheckpointExperts(files, index)
    except MissingTensorError:  # shared experts, or routers, of a layer without experts of its own
        return None
    if experts.count == 0:
        raise ConvertError(f"{experts.where}: the tensors of experts are empty")
    for name in names:
        files.entry(name)
    return SourceLayer(
        index, experts.count, experts.sizes, experts.biases, tuple(sorted({files.file_of(name) for name in names}))
    )


def _config(path: Path) -> ModelConfig | None:
    """None where it is missing, or says things that model_config does not know: the tensors say enough."""
    with suppress(OSError, ValueError):
        return model_config(path if path.is_dir() else path.parent)
    return None


def _check_counts(path: Path, layers: list[SourceLayer], config: ModelConfig | None) -> None:
    most = max(layers, key=lambda layer: layer.experts)
    for layer in layers:
        if config is not None and layer.experts != config.num_experts:
            raise ConvertError(
                f"{path}: layer {layer.index} has experts 0..{layer.experts - 1}, but config.json says that there are "
                f"{config.num_experts}; is the download complete?"
            )
        if layer.experts != most.experts:
            raise ConvertError(
                f"{path}: layer {layer.index} has experts 0..{layer.experts - 1}, layer {most.index} has "
                f"0..{most.experts - 1}; is the download complete?"
            )


def _input_type(files: TensorFiles, layer_idx: int) -> str:
    stored, _ = CheckpointExperts(files, layer_idx).stored_as()
    name = stored.method if isinstance(stored, Encoding) else stored
    return next((known for known, names in INPUT_TYPES.items() if name in names), name.lower())
