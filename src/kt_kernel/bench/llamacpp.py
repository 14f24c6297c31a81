"""llama.cpp's side of a measurement, inside its own process: ``llamacpp_layer/layer.cc`` on one of its CPU modules.

bench/README.md tells what was found out about it.
"""

import base64
import ctypes
from pathlib import Path
from statistics import median

import numpy as np

from kt_kernel.bench import gguf_blocks
from kt_kernel.bench.batch import Batch, from_float, gguf_weights, to_float
from kt_kernel.bench.llamacpp_build import LAYER
from kt_kernel.bench.llamacpp_library import LlamaCppLibrary
from kt_kernel.bench.shapes import Shape
from kt_kernel.bench.timing import sample

_TRIAL_SECONDS = 0.3


class LlamaCpp:
    """Answers the requests of ``client``; every public method is one."""

    def __init__(self, folder: str, module: str):
        self._call = LlamaCppLibrary(Path(folder) / LAYER).call
        self._module = module
        self._threads: int | None = None
        self._held: tuple | None = None
        self._layouts: list[str] = []
        self._bytes_per_expert = 0
        self._shape: Shape | None = None
        self._batch: Batch | None = None
        self._ids: list[np.ndarray] = []
        self._choice: dict[int, int] = {}  # tokens -> index of the layout
        self._call("load", str(Path(folder) / f"libggml-cpu-{module}.so").encode())

    def hello(self) -> dict:
        return {"variant": self._module, "formats": list(gguf_blocks.BLOCKS)}

    def open(self, shape: dict, weight_format: str, threads: int, max_tokens: int, copies: int) -> dict:
        """``max_tokens`` is for the others: here rows are allocated for each token count."""
        if self._threads != threads:
            self._call("set_threads", ctypes.c_int(threads))
            self._threads, self._choice = threads, {}
        wanted = (Shape(**shape), weight_format, copies)
        if self._held != wanted:
            self.close()
            self._load(*wanted)
            self._held = wanted
        return {"packed_bytes_per_expert": self._bytes_per_expert}

    def close(self) -> None:
        self._held = self._batch = None
        self._choice = {}

    def time(self, tokens: int, seconds: float) -> dict:
        layout = self._layout_for(tokens)
        batch = self._batch_of(tokens)
        us = sample(lambda call: self._forward(layout, call), seconds)
        self._call("rest")  # its workers would wait awake beside the other side
        return {"unique_experts": batch.unique_experts, "us": us, "layout": self._layouts[layout]}

    def output(self, tokens: int, layout: str | None = None) -> dict:
        """Of the layout that is timed, or of the one that is asked for."""
        index = self._layouts.index(layout) if layout else self._layout_for(tokens)
        batch = self._batch_of(tokens)
        self._forward(index, 0)
        result = np.empty(batch.output.shape, np.float32)
        self._call("output", ctypes.c_void_p(result.ctypes.data))
        self._call("rest")
        return {"bf16": base64.b64encode(from_float(result).tobytes()).decode()}

    def layouts(self) -> list[str]:
        return self._layouts

    def _load(self, shape: Shape, weight_format: str, copies: int) -> None:
        sizes = (shape.experts, shape.top_k, shape.hidden, shape.intermediate)
        size = ctypes.c_int64()
        self._call(
            "make", weight_format.encode(), *map(ctypes.c_int64, sizes), ctypes.c_int(copies), ctypes.byref(size)
        )
        for expert in range(shape.experts):
            for matrix, rows in enumerate(gguf_weights(shape, weight_format, expert)):
                self._call("fill", ctypes.c_int(matrix), ctypes.c_int64(expert), ctypes.c_void_p(rows.ctypes.data))
        name = ctypes.c_char_p()
        self._call("repack", ctypes.byref(name))
        self._shape, self._bytes_per_expert = shape, size.value
        self._layouts = ["plain", name.value.decode()] if name.value else ["plain"]

    def _layout_for(self, tokens: int) -> int:
        """The faster one."""
        if len(self._layouts) == 1:
            return 0
        if tokens not in self._choice:
            self._batch_of(tokens)
            taken = []
            for layout in range(len(self._layouts)):
                us = sample(lambda call, layout=layout: self._forward(layout, call), _TRIAL_SECONDS)
                taken.append(median(us))
            self._choice[tokens] = taken.index(min(taken))
        return self._choice[tokens]

    def _batch_of(self, tokens: int) -> Batch:
        if self._batch is None or self._batch.tokens != tokens:
            self._batch = batch = Batch(self._shape, tokens)
            self._ids = [ids.astype(np.int32) for ids in batch.ids]
            self._addresses = [ctypes.c_void_p(ids.ctypes.data) for ids in self._ids]
            rows = to_float(batch.input)
            arrays = (ctypes.c_void_p(array.ctypes.data) for array in (rows, batch.weights))
            self._call("prepare", ctypes.c_int64(tokens), *arrays)
            for layout in range(len(self._layouts)):
                self._forward(layout, 0)  # touches every buffer
        return self._batch

    def _forward(self, layout: int, call: int) -> None:
        ids = self._addresses[call % len(self._addresses)]
        self._call("forward", ctypes.c_int(layout), ctypes.c_int64(call), ids)
