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


# side -> where in kt_kernel it is
SIDES = {
    "ours": ("bench.ours", "Ours"),
    "beside_gpu": ("bench.beside_gpu", "BesideGpu"),
    "released": ("bench.released", "Released"),  # MODULE
    "llamacpp": ("bench.llamacpp", "LlamaCpp"),  # FOLDER MODULE
    "quality": ("bench.quality", "QualitySide"),
    "engine": ("bench.engine_side", "EngineSide"),
    "http": ("bench.http_side", "HttpSide"),
    "stock": ("bench.stock_side", "StockSide"),
    "llamacpp_model": ("bench.llamacpp_side", "LlamaCppSide"),  # FOLDER MODULE
    "doctor": ("doctor.measure", "DoctorSide"),
    "verify": ("verify.side", "VerifySide"),
}


def _make(side: str, arguments: list[str]):
    module, name = SIDES[side]
    return getattr(import_module(f"kt_kernel.{module}"), name)(*arguments)


if __name__ == "__main__":
    main()
