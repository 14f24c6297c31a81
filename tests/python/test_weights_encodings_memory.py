"""Decoding goes expert by expert: beside the layer, memory holds one decoded expert and what it is made from."""

import subprocess
import sys

import encoded_weights as made
import numpy as np
import pytest
from layer_reference import Shape
from test_weights_memory import MEASURE
from weight_files import METHODS, PROJECTIONS, write_safetensors

SHAPE = Shape(experts=12, top_k=2, hidden=2048, intermediate=2048)  # 302 MB as bf16


@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
@pytest.mark.parametrize("encode", [made.fp8_block, made.awq, made.mxfp4], ids=["fp8_block", "awq", "mxfp4"])
def test_memory_grows_by_the_packed_bytes(encode, weight_format, tmp_path):
    parts, _ = encode(np.random.default_rng(0), SHAPE.intermediate, SHAPE.hidden)
    tensors, dtypes = {}, {}
    for stem in (f"layers.0.mlp.experts.{e}.{p}_proj" for e in range(SHAPE.experts) for p in PROJECTIONS):
        tensors |= {f"{stem}.{suffix}": array for suffix, (_, array) in parts.items()}
        dtypes |= {f"{stem}.{suffix}": dtype for suffix, (dtype, _) in parts.items()}
    path = write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    sizes = [str(size) for size in (SHAPE.experts, SHAPE.hidden, SHAPE.intermediate)]
    arguments = [sys.executable, "-c", MEASURE, METHODS[weight_format], weight_format, str(tmp_path), *sizes]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120)
    path.unlink()
    growth, peak, packed = map(int, result.stdout.split())
    expert = 3 * SHAPE.hidden * SHAPE.intermediate * 2
    megabyte = 1 << 20
    assert growth <= 1.05 * packed + expert + 8 * megabyte  # freed arrays that the allocator has not given back
    assert peak <= 1.05 * packed + 2 * expert + 8 * megabyte
