"""Files that the scripts of kt-kernel 0.4 to 0.7 converted, merged or not.

Every projection is cut into T parts, T being the number of thread pools it was converted for: gate and up by rows, down
by columns, each with its own row scales. Their byte layout is `blocks` of cpp/formats/code_layouts.h.
"""

import re
from abc import ABC, abstractmethod
from itertools import count
from pathlib import Path

import numpy as np

from kt_kernel import _core
from kt_kernel.methods import wrong_method
from kt_kernel.weights.experts import PROJECTIONS, Sizes, count_consecutive
from kt_kernel.weights.mapped_file import MappedFile, MissingTensorError
from kt_kernel.weights.tensor_files import TensorFiles

_CODES_PER_BYTE = {"int8": 1, "int4": 2}


def check_layout(where: object, name: str) -> None:
    """Of a method, or of a file: these hold what a library made, which merged files do not tell."""
    if name.startswith("MOE_INT"):
        method = name[: len("MOE_INT8")]
        raise ValueError(
            f"{where}: kt-kernel 0.4 to 0.7 wrote weights for {method} as a library of the vendor reorders them (BLIS, "
            f"KML), which only that library reads: convert the original model, with 'kt quant --quant-method "
            f"{method.lower()}'. If these were converted with int8 or int4 they are for {method.replace('MOE_', 'AMX')}"
        )


class ReleasedExperts(ABC):
    """What both forms share: subclasses know where a part lies."""

    where: str
    parts: int
    count: int

    biases = False

    def __init__(self, weight_format: str | None, sizes: Sizes):
        self._format, self._sizes = weight_format, sizes

    @abstractmethod
    def _array(self, projection: str, expert: int, part: int, kind: str, dtype: type, elements: int) -> np.ndarray: ...

    def _check_cut(self) -> None:
        if self._sizes.intermediate % self.parts:
            raise ValueError(
                f"{self.where} is cut into {self.parts} parts, which do not divide intermediate_size "
                f"{self._sizes.intermediate}; is it this model?"
            )

    def _part_shape(self, projection: str) -> tuple[int, int]:
        return Sizes(self._sizes.hidden, self._sizes.intermediate // self.parts).shape(projection)

    def _coded(self, projection: str, expert: int) -> list[tuple[np.ndarray, np.ndarray]]:
        rows, depth = self._part_shape(projection)
        codes = rows * depth // _CODES_PER_BYTE[self._format]
        return [
            (
                self._array(projection, expert, part, "weight", np.int8, codes),
                self._array(projection, expert, part, "scale", np.float32, rows),
            )
            for part in range(self.parts)
        ]

    def load(self, layer: "_core.MoELayer", slot: int, expert: int) -> None:
        coded = [self._coded(projection, expert) for projection in PROJECTIONS]
        try:
            layer.load_codes(slot, *coded, layout="blocks")
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None

    def __enter__(self) -> "ReleasedExperts":
        return self


class MergedExperts(ReleasedExperts):
    """blk.{L}.ffn_{p}_exps.{e}.numa.{n}.weight and .scale in safetensors."""

    def __init__(self, files: TensorFiles, layer_idx: int, weight_format: str | None, sizes: Sizes):
        """Without a format it is the one that is stored."""
        super().__init__(weight_format, sizes)
        self._files, self._layer_idx, self.where = files, layer_idx, f"{files.path} (layer {layer_idx})"
        self.parts = count_consecutive(self._name("gate", 0, part, "weight") in files for part in count())
        self.count = count_consecutive(self._name("gate", expert, 0, "weight") in files for expert in count())
        self._check_cut()
        self.format = self._stored_format()
        if weight_format not in (None, self.format):
            raise wrong_method(self.where, self.format, weight_format)

    def _stored_format(self) -> str:
        """The files do not tell, but their sizes do."""
        name = self._name("gate", 0, 0, "weight")
        entry = self._files.entry(name)
        rows, depth = self._part_shape("gate")
        for weight_format, codes_per_byte in _CODES_PER_BYTE.items():
            if (entry.end - entry.begin) * codes_per_byte == rows * depth:
                return weight_format
        raise ValueError(
            f"{self.where}: tensor {name!r} has {entry.end - entry.begin} bytes, which is neither int8 nor int4 of "
            f"[{rows}, {depth}]; is it this model?"
        )

    def _name(self, projection: str, expert: int, part: int, kind: str) -> str:
        return f"blk.{self._layer_idx}.ffn_{projection}_exps.{expert}.numa.{part}.{kind}"

    def _array(self, projection: str, expert: int, part: int, kind: str, dtype: type, elements: int) -> np.ndarray:
        dtypes = ("F32",) if kind == "scale" else ("I8", "U8")
        return self._files.array(self._name(projection, expert, part, kind), dtypes, (elements,)).view(dtype)

    def will_need(self, expert: int) -> None:
        self._files.will_need(
            self._name(projection, expert, part, "weight") for projection in PROJECTIONS for part in range(self.parts)
        )

    def forget(self) -> None:
        self._files.forget()

    def __exit__(self, *_) -> None:
        self._files.__exit__()


class TreeExperts(ReleasedExperts):
    """_layer_{L}/_numa_{n}/{INT4|INT8}_{p}_{e}_{bytes}Byte_{quant|scale}_.kt, raw bytes."""

    _NAME = re.compile(r"(INT4|INT8)_(gate|up|down)_(\d+)_\d+Byte_(quant|scale)_\.kt")
    _KINDS = {"quant": "weight", "scale": "scale"}  # noqa: RUF012

    def __init__(self, folder: Path, layer_idx: int, weight_format: str, sizes: Sizes):
        super().__init__(weight_format, sizes)
        self._folder = folder / f"_layer_{layer_idx}"
        self.where = str(self._folder)
        if not self._folder.is_dir():
            found = sorted(path.name for path in folder.glob("_layer_*"))
            raise FileNotFoundError(f"{self._folder} does not exist; {folder} has {', '.join(found)}")
        self.parts = count_consecutive((self._folder / f"_numa_{part}").is_dir() for part in count())
        if self.parts == 0:
            raise FileNotFoundError(f"{self._folder}/_numa_0 does not exist; the conversion is incomplete")
        self._check_cut()
        self._files = self._scan()
        self.count = count_consecutive(("gate", expert, 0, "weight") in self._files for expert in count())

    @classmethod
    def formats_in(cls, folder: Path, layer_idx: int) -> set[str]:
        names = (path.name for path in (folder / f"_layer_{layer_idx}").glob("_numa_0/*.kt"))
        return {match[1].lower() for name in names if (match := cls._NAME.fullmatch(name))}

    def _scan(self) -> dict[tuple[str, int, int, str], Path]:
        files: dict[tuple[str, int, int, str], Path] = {}
        others = set()
        for part in range(self.parts):
            for path in sorted((self._folder / f"_numa_{part}").iterdir()):
                if (match := self._NAME.fullmatch(path.name)) is None:
                    check_layout(self.where, path.name)
                    continue
                if match[1].lower() != self._format:
                    others.add(match[1].lower())
                    continue
                key = (match[2], int(match[3]), part, self._KINDS[match[4]])
                if key in files:
                    raise ValueError(f"{path} and {files[key].name} are the same weights; remove one of them")
                files[key] = path
        if not files and others:
            raise wrong_method(self.where, min(others), self._format)
        if not files:
            raise FileNotFoundError(
                f"{self._folder} has no INT8_*.kt or INT4_*.kt below _numa_0; convert the weights again"
            )
        return files

    def _array(self, projection: str, expert: int, part: int, kind: str, dtype: type, elements: int) -> np.ndarray:
        path = self._files.get((projection, expert, part, kind))
        if path is None:
            raise MissingTensorError(
                f"{self._folder}/_numa_{part} has no {kind} of {projection} of expert {expert}; is the conversion "
                "complete?"
            )
        file, needed = MappedFile(path), elements * np.dtype(dtype).itemsize
        if file.size != needed:
            raise ValueError(f"{path} has {file.size} bytes; this layer needs {needed}. Is it this model?")
        return file.array(0, dtype, (elements,))

    def will_need(self, expert: int) -> None:
        """Every file is small and read whole."""

    def forget(self) -> None:
        """Mappings end with the arrays."""

    def __exit__(self, *_) -> None:
        pass
