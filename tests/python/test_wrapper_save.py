"""cpu_save: what load_weights_from_tensors writes, and that it loads again; and the memory that a load takes."""

import subprocess
import sys

import pytest
from layer_reference import Shape
from wrapper_cases import METHODS, SHAPE, batch, make, same_bits, tensors

QUANTISED = [method for method in METHODS if method != "BF16"]


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_written_unless_asked(method, tmp_path, monkeypatch):
    here, folder = tmp_path / "here", tmp_path / "weights"
    here.mkdir()
    folder.mkdir()
    monkeypatch.chdir(here)
    for path in (folder, tmp_path / "absent", ""):
        make(SHAPE, method, weight_path=path).load_weights_from_tensors(*tensors())
    assert sorted(tmp_path.rglob("*")) == [here, folder]


@pytest.mark.parametrize("subpools", [1, 2])
@pytest.mark.parametrize("method", QUANTISED)
def test_what_is_written_loads_to_the_same_bits(method, subpools, tmp_path):
    folder = tmp_path / "made" / "by" / "it"
    options = {"weight_path": folder, "cpuinfer_threads": 2, "threadpool_count": subpools}
    tokens = batch(SHAPE, 9)
    outs = {}
    for layer in (0, 7):
        wrapper = make(SHAPE, method, layer_idx=layer, cpu_save=True, **options)
        wrapper.load_weights_from_tensors(*tensors(seed=layer))
        outs[layer] = wrapper.forward(*tokens)
    assert len([*folder.iterdir()]) == 2
    for layer, out in outs.items():
        fresh = make(SHAPE, method, layer_idx=layer, **options)
        fresh.load_weights()
        assert same_bits(fresh.forward(*tokens), out)


def test_files_hold_logical_experts(tmp_path):
    """A map is applied when loading, so the same file serves any."""
    mapping, tokens = [3, 1, 0, 2, 5, 4], batch(SHAPE, 9)
    saved = make(SHAPE, "AMXINT8", weight_path=tmp_path, cpu_save=True)
    saved.load_weights_from_tensors(*tensors(), mapping)
    for given in (mapping, None):
        fresh, direct = (make(SHAPE, "AMXINT8", weight_path=tmp_path) for _ in range(2))
        fresh.load_weights(given)
        direct.load_weights_from_tensors(*tensors(), given)
        assert same_bits(fresh.forward(*tokens), direct.forward(*tokens))
    assert same_bits(saved.forward(*tokens), _with_map(tmp_path, mapping).forward(*tokens))


def _with_map(folder, mapping):
    wrapper = make(SHAPE, "AMXINT8", weight_path=folder)
    wrapper.load_weights(mapping)
    return wrapper


def test_files_of_either_name_of_a_method(tmp_path):
    wrapper = make(SHAPE, "MOE_INT8", weight_path=tmp_path, cpu_save=True)
    wrapper.load_weights_from_tensors(*tensors())
    fresh = make(SHAPE, "AMXINT8", weight_path=tmp_path)
    fresh.load_weights()
    assert same_bits(fresh.forward(*batch()), wrapper.forward(*batch()))


LARGE = Shape(experts=16, top_k=2, hidden=2048, intermediate=2048)  # 201 MB of int8

MEASURE = """
import ctypes, sys, torch
from kt_kernel import KTMoEWrapper

def resident():
    ctypes.CDLL(None).malloc_trim(0)  # what was freed and is kept by the allocator is nobody's
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Rss:"))

folder, source, experts, hidden, intermediate = sys.argv[1:]
experts, hidden, intermediate = int(experts), int(hidden), int(intermediate)
signs = torch.randint(0, 2, (intermediate, hidden)).bfloat16() - 0.5
given = [part.expand(experts, *part.shape) for part in (signs, signs, signs.T.contiguous())]
common = {"cpuinfer_threads": 2, "chunked_prefill_size": 8, "method": "AMXINT8", "weight_path": folder}
small = KTMoEWrapper(1, 2, 1, 64, 64, cpu_save=True, **common)
small.load_weights_from_tensors(*(part[:2, :64, :64] for part in given))  # what is loaded once
small.load_weights()
wrapper = KTMoEWrapper(0, experts, 2, hidden, intermediate, cpu_save=source == "save", **common)
before = resident()
if source == "files":
    wrapper.load_weights()
else:
    wrapper.load_weights_from_tensors(*given)
print(resident() - before, wrapper.moe.packed_bytes_per_expert * experts)
"""


def test_a_load_takes_the_packed_bytes(tmp_path):
    sizes = [str(size) for size in (LARGE.experts, LARGE.hidden, LARGE.intermediate)]
    for source in ("tensors", "save", "files"):  # the last reads what the one before wrote
        command = [sys.executable, "-c", MEASURE, str(tmp_path), source, *sizes]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        growth, packed = map(int, result.stdout.split())
        assert packed > 200e6
        assert packed <= growth + (4 << 20), source  # it is there
        assert growth <= 1.05 * packed, source
