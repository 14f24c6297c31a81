"""Decoding goes expert by expert: beside the layer, memory holds one decoded expert and what it is made from.

A layer that keeps codes takes them from the file: no second copy of any expert.
"""

import subprocess
import sys

import encoded_weights as made
import numpy as np
import pytest
from layer_reference import Shape
from test_weights_memory import MEASURE
from weight_files import PROJECTIONS, write_safetensors

from kt_kernel.methods import METHODS

SHAPE = Shape(experts=12, top_k=2, hidden=2048, intermediate=2048)  # 302 MB as bf16


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "kept"])
@pytest.mark.parametrize(
    ("encode", "own"),
    [(made.fp8_block, "FP8"), (made.awq, "AWQ"), (made.mxfp4, "MXFP4")],
    ids=["fp8_block", "awq", "mxfp4"],
)
def test_memory_grows_by_the_packed_bytes(encode, own, method, tmp_path):
    kept = method == "kept"
    method = own if kept else method
    parts, _ = encode(np.random.default_rng(0), SHAPE.intermediate, SHAPE.hidden)
    tensors, dtypes = {}, {}
    for stem in (f"layers.0.mlp.experts.{e}.{p}_proj" for e in range(SHAPE.experts) for p in PROJECTIONS):
        tensors |= {f"{stem}.{suffix}": array for suffix, (_, array) in parts.items()}
        dtypes |= {f"{stem}.{suffix}": dtype for suffix, (dtype, _) in parts.items()}
    path = write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    sizes = [str(size) for size in (SHAPE.experts, SHAPE.hidden, SHAPE.intermediate)]
    arguments = [sys.executable, "-c", MEASURE, method, METHODS[method], str(tmp_path), *sizes]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120)
    path.unlink()
    growth, peak, packed = map(int, result.stdout.split())
    expert = 3 * SHAPE.hidden * SHAPE.intermediate * 2
    if kept:  # the pages of one expert, and what surrounds them
        expert = packed // SHAPE.experts
    megabyte = 1 << 20
    assert growth <= 1.05 * packed + expert + 8 * megabyte  # freed arrays that the allocator has not given back
    assert peak <= 1.05 * packed + 2 * expert + 8 * megabyte
