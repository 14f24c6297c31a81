"""A whole model on llama.cpp inside its own process: ``llamacpp_model/model.cc`` on one of its CPU modules."""

import ctypes
import time
from pathlib import Path

import numpy as np

from kt_kernel.bench.llamacpp_build import MODEL
from kt_kernel.bench.llamacpp_library import LlamaCppLibrary
from kt_kernel.bench.prompts import prompt


class LlamaCppSide:
    """Answers the requests of ``client``; every public method is one."""

    def __init__(self, folder: str, module: str):
        self._folder = Path(folder)
        self._module = self._folder / f"libggml-cpu-{module}.so"
        self._call = LlamaCppLibrary(self._folder / MODEL).call
        self._vocabulary = 0

    def open(self, path: str, vocabulary: int, threads: int, sequences: int, context: int, batch: int) -> dict:
        """Weights as the file has them: of Q8_0 there is no other layout on x86."""
        self._vocabulary = vocabulary
        sizes = (threads, sequences, context, batch)
        self._call("open", str(self._module).encode(), path.encode(), *map(ctypes.c_int, sizes))
        return {"decoder": f"llama.cpp, {self._module.stem.removeprefix('libggml-cpu-')}"}

    def prefill(self, seed: int, tokens: int) -> dict:
        start = time.perf_counter()
        self._prefill(seed, 0, tokens)
        seconds = time.perf_counter() - start
        self._call("rest")  # its workers would wait awake beside the other sides
        return {"seconds": seconds}

    def decode(self, seed: int, batch: int, prompt_tokens: int, steps: int) -> dict:
        tokens = np.array([self._prefill(seed, index, prompt_tokens) for index in range(batch)], np.int32)
        address = ctypes.c_void_p(tokens.ctypes.data)
        start = time.perf_counter()
        for _ in range(steps):
            self._call("decode", address, ctypes.c_int(batch), address)
        rate = batch * steps / (time.perf_counter() - start)
        self._call("rest")
        return {"tokens_per_s": rate}

    def answer(self, tokens: list[int], steps: int) -> list[int]:
        """The most likely continuation, to see that it is the model it should be."""
        found = [self._first(0, tokens)]
        last = np.array(found, np.int32)
        for _ in range(steps - 1):
            self._call("decode", ctypes.c_void_p(last.ctypes.data), ctypes.c_int(1), ctypes.c_void_p(last.ctypes.data))
            found.append(int(last[0]))
        self._call("rest")
        return found

    def _prefill(self, seed: int, index: int, tokens: int) -> int:
        return self._first(index, prompt(seed, index, tokens, self._vocabulary))

    def _first(self, sequence: int, tokens: list[int]) -> int:
        held, following = np.array(tokens, np.int32), np.zeros(1, np.int32)
        addresses = ctypes.c_void_p(held.ctypes.data), ctypes.c_void_p(following.ctypes.data)
        self._call("prefill", ctypes.c_int(sequence), addresses[0], ctypes.c_int(len(held)), addresses[1])
        return int(following[0])
