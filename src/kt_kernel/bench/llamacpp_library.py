"""What the two modules built on llama.cpp have in common: functions kt_* that return an error's text, or nothing."""

import ctypes
from pathlib import Path


class LlamaCppLibrary:
    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))

    def call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, f"kt_{name}")
        function.restype = ctypes.c_char_p
        error = function(*arguments)
        if error is not None:
            raise RuntimeError(error.decode())
