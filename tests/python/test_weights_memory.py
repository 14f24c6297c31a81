"""A loaded layer costs its packed bytes: no second copy of the weights, and no pages of files that stay mapped."""

import subprocess
import sys

import numpy as np
import pytest
from layer_reference import Shape
from weight_files import METHODS, PROJECTIONS, checkpoint_tensors, write_safetensors

from kt_kernel import _core
from kt_kernel.weights import save_layer

SHAPE = Shape(experts=12, top_k=2, hidden=1536, intermediate=1536)  # 170 MB of bf16

MEASURE = """
import sys
from kt_kernel import _core
from kt_kernel.weights import choose_format, load_layer

def resident():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Rss:"))

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))

method, weight_format, path, experts, hidden, intermediate = sys.argv[1:]
sizes = {"num_experts": int(experts), "hidden_size": int(hidden), "intermediate_size": int(intermediate)}
small = {"num_experts": 1, "hidden_size": 64, "intermediate_size": 64}
pool = _core.Pool([2])
group = choose_format(method, path, 0, int(hidden), int(intermediate)).group
warm = _core.MoELayer(pool, format=weight_format, top_k=2, max_tokens=8, group_size=group, **small)
layer = _core.MoELayer(pool, format=weight_format, top_k=2, max_tokens=8, group_size=group, **sizes)
before = resident()
load_layer(layer, method, path, 0)
print(resident() - before, peak() - before, layer.packed_bytes_per_expert * int(experts))
"""


@pytest.fixture(scope="module", params=["separate", "packed", "turned"])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    rng = np.random.default_rng(0)
    size = (SHAPE.hidden, SHAPE.intermediate)
    # Random signs and mantissas, one exponent: what the values are does not matter, and this is quick.
    matrices = [rng.integers(0, 1 << 16, size, np.uint16) & 0x807F | 0x3C00 for _ in PROJECTIONS]
    experts = [matrices] * SHAPE.experts
    tensors = checkpoint_tensors(experts, "model.layers.0", request.param.replace("turned", "packed"))
    if request.param == "turned":
        tensors = {name: array.transpose(0, 2, 1) for name, array in tensors.items()}
    yield write_safetensors(path, tensors, pad=None).parent
    path.unlink()


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("weight_format", ["bf16", "int8", "int4g"])
def test_memory_grows_by_the_packed_bytes(weight_format, converted, checkpoint, tmp_path):
    path = checkpoint
    if converted and weight_format == "bf16":
        return
    if converted:
        path = save_layer(_core.Pool([2]), METHODS[weight_format], path, 0, tmp_path)
    sizes = [str(size) for size in (SHAPE.experts, SHAPE.hidden, SHAPE.intermediate)]
    arguments = [sys.executable, "-c", MEASURE, METHODS[weight_format], weight_format, str(path), *sizes]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120)
    growth, peak, packed = map(int, result.stdout.split())
    megabyte = 1 << 20
    source_expert = 3 * SHAPE.hidden * SHAPE.intermediate * 2
    assert growth <= 1.05 * packed + 4 * megabyte
    # The pages of one expert, and what surrounds them, or its copy if it is turned.
    assert peak <= 1.05 * packed + 2 * source_expert + 4 * megabyte
