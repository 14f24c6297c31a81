"""Converting costs the memory of the experts that are worked on, however many layers a model has."""

import os
import subprocess
import sys

import pytest
from convert_cases import write_model
from layer_reference import Shape

SHAPE = Shape(experts=16, top_k=2, hidden=1024, intermediate=1024)
EXPERT = 3 * SHAPE.hidden * SHAPE.intermediate * 2  # bytes in bf16
LAYER = SHAPE.experts * EXPERT  # 101 MB

MEASURE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from convert_cases import run

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))

before = peak()
run(Path(sys.argv[1]), Path(sys.argv[2]), "int4g", search=False, threads=2)
print(peak() - before)
"""


@pytest.mark.parametrize("layers", [2, 6])
def test_peak_memory_is_a_few_experts_whatever_the_model(layers, tmp_path):
    source = write_model(tmp_path / "model", layers=range(1), shape=SHAPE, num_hidden_layers=layers)
    whole = (source / "model-0.safetensors").read_bytes()
    for layer in range(1, layers):  # the names have the same length
        changed = whole.replace(b"model.layers.0.", b"model.layers.%d." % layer)
        (source / f"model-{layer}.safetensors").write_bytes(changed)
    arguments = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out"), os.path.dirname(__file__)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    grown = int(done.stdout)
    print(f"{layers} layers of {LAYER / 1e6:.0f} MB: peak {grown / 1e6:.0f} MB, {grown / EXPERT:.1f} experts")
    assert grown < LAYER / 2
    assert grown < 7 * EXPERT
