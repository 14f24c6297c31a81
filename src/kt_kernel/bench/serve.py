"""A process that measures one side: a JSON request per line on stdin, a JSON answer per line on what was stdout.

usage: python -m kt_kernel.bench.serve ours | beside_gpu | released MODULE | llamacpp FOLDER MODULE
"""

import json
import os
import sys


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


def _make(side: str, arguments: list[str]):
    if side == "ours":
        from kt_kernel.bench.ours import Ours

        return Ours()
    if side == "beside_gpu":
        from kt_kernel.bench.beside_gpu import BesideGpu

        return BesideGpu()
    if side == "llamacpp":
        from kt_kernel.bench.llamacpp import LlamaCpp

        return LlamaCpp(*arguments)
    from kt_kernel.bench.released import Released

    return Released(*arguments)


if __name__ == "__main__":
    main()
