"""A process of its own that serves the scripted engine: what `kt run` does, without a model."""

import logging
import sys

from scripted_engine import ScriptedEngine

from kt_kernel.server.serving import base_url, bind, serve
from kt_kernel.server.settings import Settings

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    bound = bind("127.0.0.1", 0)
    engine = ScriptedEngine(step_seconds=float(sys.argv[1]))
    serve(engine, bound, Settings(grace_seconds=float(sys.argv[2])), lambda: print(base_url(bound), flush=True))
    print("closed", engine.stats().finished, flush=True)
