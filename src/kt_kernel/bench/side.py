"""A process that measures one side: a JSON request per line on stdin, a JSON answer per line on what was stdout.

usage: python -m kt_kernel.bench.side SIDE [ARGUMENT ...], with a SIDE of the table below
"""

import json
import os
import sys
from importlib import import_module


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers print; only answers may reach the pipe
    side = _make(sys.argv[1], sys.argv[2:])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(side, request["call"])(**request["arguments"])}
        except Exception as error:  # whatever it is belongs to the asker
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


# side -> where it is
SIDES = {
    "ours": ("ours", "Ours"),
    "beside_gpu": ("beside_gpu", "BesideGpu"),
    "released": ("released", "Released"),  # MODULE
    "llamacpp": ("llamacpp", "LlamaCpp"),  # FOLDER MODULE
    "quality": ("quality", "QualitySide"),
    "engine": ("engine_side", "EngineSide"),
    "http": ("http_side", "HttpSide"),
    "stock": ("stock_side", "StockSide"),
    "llamacpp_model": ("llamacpp_side", "LlamaCppSide"),  # FOLDER MODULE
}


def _make(side: str, arguments: list[str]):
    module, name = SIDES[side]
    return getattr(import_module(f"kt_kernel.bench.{module}"), name)(*arguments)


if __name__ == "__main__":
    main()
