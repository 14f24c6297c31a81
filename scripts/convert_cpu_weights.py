#!/usr/bin/env python3
"""Converts the experts of a model to weights for the CPU: `kt quant` under the name and options it is known by."""

import argparse
import sys
from pathlib import Path

from kt_kernel.cli.quant import SCALES, run, unneeded
from kt_kernel.convert import Settings
from kt_kernel.convert.engine import QUANT_METHODS
from kt_kernel.convert.source import INPUT_TYPES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--input-path", "-i", type=Path, required=True, help="folder of the model: config.json and safetensors")
    add("--input-type", choices=["auto", *INPUT_TYPES], default="auto", help="found by itself")
    add("--output", "-o", type=Path, required=True, help="folder for the converted weights")
    add("--quant-method", choices=QUANT_METHODS, default="int4")
    add("--scales", choices=SCALES, default="searched", help="for the least squared error, or of the largest weight")
    add("--cpuinfer-threads", type=int, help="threads (default: every usable CPU)")
    add("--threadpool-count", type=int, help="not needed: the files fit any number")
    add("--no-merge-safetensor", action="store_true", help="not needed: every layer is a file of its own")
    add("--resume-layer", type=int, default=0, help="leave the layers below this one as they are")
    add("--gpu", action="store_true", help="not needed: no GPU is used")
    add("--overwrite", action="store_true", help="begin anew in a folder that holds other converted weights")
    return parser


def main() -> int:
    parser = _parser()
    given = parser.parse_args()
    if given.cpuinfer_threads is not None and given.cpuinfer_threads < 1:
        parser.error("--cpuinfer-threads must be at least 1")
    settings = Settings(
        given.input_path,
        given.output,
        given.quant_method,
        given.input_type,
        SCALES[given.scales],
        given.cpuinfer_threads,
        given.resume_layer,
        given.overwrite,
    )
    return run(parser.prog, settings, unneeded(given.threadpool_count, given.no_merge_safetensor, given.gpu))


if __name__ == "__main__":
    sys.exit(main())
