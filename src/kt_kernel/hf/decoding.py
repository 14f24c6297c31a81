"""Checkpoints that are quantised already: what is not experts becomes floats while it loads.

Stock quantizers of transformers want packages and GPUs for that. We know the encodings (kt_kernel.weights.encodings),
so a linear of any of them is decoded here, on the CPU, rounded once to bf16.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from kt_kernel.hf.sources import KeyMap
from kt_kernel.weights.encodings import CODES, ENCODINGS, FLOATS, SUFFIXES, find, open_parts
from kt_kernel.weights.tensor_files import Entry, TensorFiles

# dtype of torch -> that of safetensors, and the one numpy has for its bits
_DTYPES = {
    torch.bfloat16: ("BF16", torch.int16, np.uint16),
    torch.float16: ("F16", None, None),
    torch.float32: ("F32", None, None),
    torch.float8_e4m3fn: ("F8_E4M3", torch.uint8, None),
    torch.float8_e8m0fnu: ("F8_E8M0", torch.uint8, None),
    torch.uint8: ("U8", None, None),
    torch.int8: ("I8", None, None),
    torch.int32: ("I32", None, None),
    torch.int64: ("I64", None, None),
}

# Scales of activations, which decoded weights do not need.
IGNORED = r"\.(input|output|activation|[kqv])_scale(_inv)?$"


class EncodedNames(NamedTuple):
    """What is encoded in a checkpoint, experts left out."""

    leaves: frozenset[str]  # last names of modules, such as q_proj, as the model calls them
    suffixes: tuple[str, ...]  # of their tensors; `weight`, which what is not encoded has, comes first


def find_encoded(files: TensorFiles, keys: KeyMap, experts: Iterable[str]) -> EncodedNames:
    """From names and headers. `experts`: names of modules whose tensors do not count.

    A linear that is quantised in a way that is not known is a ValueError: transformers would make up its weights.
    """
    leaves, suffixes, prefixes, seen = set(), set(), tuple(f"{name}." for name in experts), set()
    for name in files:
        stem, _, suffix = name.rpartition(".")
        kind = re.sub(r"\d+", "0", name)  # layers and experts of a kind are alike, and large models have 90,000
        if kind in seen or (suffix == "weight" and files.entry(name).dtype in FLOATS):
            continue
        present = [other for other in SUFFIXES if f"{stem}.{other}" in files]
        if present == ["weight"] == [suffix] or not any(codes in present for codes in CODES):
            _refuse_unknown(files, name, keys)
        if suffix not in CODES or present == ["weight"]:
            continue
        seen.add(kind)
        renamed = keys.renamed(f"{stem}.weight")
        if not renamed.startswith(prefixes) and not keys.target(f"{stem}.weight")[0].startswith(prefixes):
            leaves.add(renamed.split(".")[-2])
            suffixes.update(present)
    return EncodedNames(frozenset(leaves), ("weight", *sorted(suffixes - {"weight"})))


def _refuse_unknown(files: TensorFiles, name: str, keys: KeyMap) -> None:
    """If `name` is a matrix of the model in something other than floats, or stands for a part of one."""
    stem, _, suffix = name.rpartition(".")
    if not keys.leads_to_parameter(f"{stem}.weight") or (suffix != "weight" and keys.leads_to_parameter(name)):
        return
    known = ", ".join(dict.fromkeys(row.name for row in ENCODINGS))
    raise ValueError(
        f"{files.file_of(name)}: tensor {name!r} ({files.entry(name).dtype}) belongs to a matrix that is quantised in "
        f"no known encoding; known are {known}: load another version of the model, or this one without KTConfig"
    )


class Decode(ConversionOps):
    """Tensors of a matrix -> the matrix, in the dtype of the parameter. What is in floats already passes through."""

    def __init__(self, hf_quantizer, target: str | None = None):
        self.hf_quantizer = hf_quantizer  # tells transformers not to cast what comes in
        self._target = target  # what the result is called; None: as the weights that other operations look for

    def __deepcopy__(self, _: dict) -> "Decode":
        """transformers copies converters for every parameter; the quantizer must stay the one that it is."""
        return self

    def convert(self, input_dict, full_layer_name=None, model=None, **_):
        stems: dict[str, dict[str, list[torch.Tensor]]] = {}
        for pattern, tensors in input_dict.items():
            stem, _, suffix = pattern.removesuffix("$").rpartition(".")
            stems.setdefault(stem, {})[suffix] = tensors if isinstance(tensors, list) else [tensors]
        parameter = model.get_parameter_or_buffer(full_layer_name)
        try:
            return {
                self._target or f"{stem}.weight": self._matrices(parts, full_layer_name, parameter.dtype)
                for stem, parts in stems.items()
            }
        except ValueError as error:
            if self._target is None:
                raise
            self.hf_quantizer.fail(error)
            return {self._target: torch.zeros_like(parameter, device="cpu")}

    def _matrices(self, parts: dict[str, list[torch.Tensor]], name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        rows = ({suffix: tensors[i] for suffix, tensors in parts.items()} for i in range(max(map(len, parts.values()))))
        return [self._matrix(row, name, dtype) for row in rows]

    def _matrix(self, tensors: dict[str, torch.Tensor], name: str, dtype: torch.dtype) -> torch.Tensor:
        files = _InMemory(tensors, name, self.hf_quantizer.where)
        encoding = find(files, "", self.hf_quantizer.checkpoint_format)
        if encoding is None:
            return tensors["weight"].to(dtype)
        parts = open_parts(files, "", encoding)
        bits = encoding.decode(parts, encoding.shape(parts))
        device = next(iter(tensors.values())).device
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(device, dtype)


class _InMemory:
    """Tensors of one matrix, in the manner of TensorFiles."""

    def __init__(self, tensors: dict[str, torch.Tensor], name: str, where: Path):
        self._tensors, self._name, self._where = tensors, name, where

    def __contains__(self, name: str) -> bool:
        return name.removeprefix(".") in self._tensors

    def entry(self, name: str) -> Entry:
        tensor = self._tensors[name.removeprefix(".")]
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{self.file_of(name)}: {name} is {tensor.dtype}, which no known encoding has")
        return Entry(_DTYPES[tensor.dtype][0], tuple(tensor.shape), 0, 0)

    def file_of(self, name: str) -> str:
        return f"{self._where} (for {self._name})"

    def array(self, name: str, dtypes: Iterable[str], shape: tuple[int, ...]) -> np.ndarray:
        tensor = self._tensors[name.removeprefix(".")].cpu().contiguous()
        _, bits, kind = _DTYPES[tensor.dtype]
        array = (tensor if bits is None else tensor.view(bits)).numpy()
        return array if kind is None else array.view(kind)


def converters(quantizer, encoded: EncodedNames) -> list[WeightConverter]:
    """For parameters that no converter of the model makes. One for each last name, so that parameters which happen to
    be called `scale` stay what they are.
    """
    return [
        WeightConverter(
            [rf"\.{leaf}\.{suffix}$" for suffix in encoded.suffixes],
            f".{leaf}.weight",
            [Decode(quantizer, f".{leaf}.weight")],
        )
        for leaf in sorted(encoded.leaves)
    ]
