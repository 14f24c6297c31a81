"""What a pool and a layer accept, and what they say otherwise."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_codes import group_size
from layer_limits import FORMATS, VARIANTS
from layer_reference import Case, Shape, from_bf16, random_batch

from kt_kernel import _core

GOOD = {
    "format": "bf16",
    "num_experts": 3,
    "top_k": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_tokens": 4,
}


def layer(threads=(1,), **changes) -> "_core.MoELayer":
    return _core.MoELayer(_core.Pool(list(threads)), **{**GOOD, **changes})


def weights(gate=(80, 48), up=(80, 48), down=(48, 80), dtype=np.uint16):
    return [np.zeros(shape, dtype) for shape in (gate, up, down)]


def test_zero_tokens_need_no_addresses():
    layer().forward(0, 0, 0, 0, 0)
    layer((1, 1)).forward(0, 0, 0, 0, 0, incremental=True)


@pytest.mark.parametrize("missing", range(4))
def test_a_null_address_is_an_error(missing):
    addresses = [np.zeros(1000).ctypes.data] * 4
    addresses[missing] = 0
    with pytest.raises(ValueError, match="address is 0"):
        layer().forward(1, *addresses)


def test_an_addend_beside_incremental_is_an_error():
    with pytest.raises(ValueError, match="pass one of the two"):
        layer().forward(0, 0, 0, 0, 0, incremental=True, addend=64)


@pytest.mark.parametrize("id_bytes", [0, 1, 2, 16, -8])
def test_ids_of_another_width_are_an_error(id_bytes):
    with pytest.raises(ValueError, match=rf"ids have {id_bytes} bytes; pass int32 \(4\) or int64 \(8\)"):
        layer().forward(0, 0, 0, 0, 0, id_bytes=id_bytes)


@pytest.mark.parametrize("tokens", [5, -1])
def test_too_many_tokens_are_an_error_that_names_the_limit(tokens):
    with pytest.raises(ValueError, match=f"{tokens} tokens.* at most 4"):
        layer().forward(tokens, 0, 0, 0, 0)


def test_an_unknown_format_is_told_the_known():
    with pytest.raises(ValueError, match="'int3' is unknown.* " + ", ".join(_core.formats())):
        layer(format="int3")


def test_an_unknown_variant_is_told_the_known():
    with pytest.raises(ValueError, match=r"avx3.*known: .*avx2"):
        layer(variant="avx3")


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if not variant.runnable])
def test_a_variant_this_cpu_lacks_is_refused(name):
    with pytest.raises(RuntimeError, match="this CPU lacks"):
        layer(variant=name)


@pytest.mark.parametrize("name", [name for name in GOOD if name != "format"])
@pytest.mark.parametrize("value", [0, -1, 2**31 - 1])
def test_sizes_out_of_range_are_errors_that_name_them(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is {value}; it must be in 1\.\."):
        layer(**{name: value})


@pytest.mark.parametrize("name", ["swiglu_limit", "swiglu_alpha"])
@pytest.mark.parametrize("value", [-1.0, -1e-9, float("nan"), float("inf"), 1e300])
def test_an_activation_that_cannot_be_is_an_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=f"^{name} is .*; it must be above 0, or 0 to turn it off"):
        layer(**{name: value})


def test_an_intermediate_too_small_for_the_nodes_is_told_the_limit():
    with pytest.raises(ValueError, match=r"intermediate_size 80 cannot be split over 3 nodes.* 64 columns.* at most 2"):
        layer((1, 1, 1))


def test_more_nodes_than_a_layer_can_use_are_an_error():
    with pytest.raises(ValueError, match="65 nodes; a layer can use at most 64"):
        layer([1] * 65, intermediate_size=65 * 64)


@pytest.mark.parametrize("expert", [-1, 3])
def test_an_expert_that_is_not_there(expert):
    with pytest.raises(ValueError, match=rf"expert {expert} is not in 0\.\.2"):
        layer().load_expert(expert, *weights())
    with pytest.raises(ValueError, match=rf"expert {expert} is not in 0\.\.2"):
        layer().decode_expert(expert)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int16, np.uint8])
def test_weights_of_another_type(dtype):
    with pytest.raises(TypeError, match="gate must hold bf16"):
        layer().load_expert(0, *weights(dtype=dtype))


@pytest.mark.parametrize("name", ["gate", "up", "down"])
@pytest.mark.parametrize("shape", [(48, 81), (80, 48, 1), (80,), (48, 48)])
def test_weights_of_another_shape(name, shape):
    with pytest.raises(ValueError, match=rf"^{name} has shape \[.*\]; this layer needs \["):
        layer().load_expert(0, *weights(**{name: shape}))


def test_weights_that_are_no_array():
    with pytest.raises(TypeError):
        layer().load_expert(0, None, None, None)


def test_strided_and_read_only_weights_are_read_right():
    made = layer()
    gate = np.arange(80 * 48, dtype=np.uint16).reshape(48, 80).T
    up, down = weights()[1:]
    down.flags.writeable = False
    made.load_expert(0, gate, up, down)
    assert np.array_equal(made.decode_expert(0)[0], from_bf16(gate))


@pytest.mark.parametrize(
    ("threads", "message"), [([], "at least one node"), ([0], "at least 1"), ([1, -1], "at least 1"), ([9999], "most")]
)
def test_pools_that_cannot_be(threads, message):
    with pytest.raises(ValueError, match=message):
        _core.Pool(threads)


def test_lists_of_a_pool_have_one_entry_per_node():
    with pytest.raises(ValueError, match="one entry per node"):
        _core.Pool([1, 1], numa_ids=[0])
    with pytest.raises(ValueError, match="one entry per node"):
        _core.Pool([1], cpus=[[0], [1]])


def test_a_layer_keeps_its_pool_alive():
    pool = _core.Pool([2])
    before = sys.getrefcount(pool)
    made = _core.MoELayer(pool, **GOOD)
    assert sys.getrefcount(pool) == before + 1
    del made
    gc.collect()
    assert sys.getrefcount(pool) == before


def test_a_layer_that_finds_no_memory_does_not_harm_the_others():
    shape = Shape(experts=2, top_k=1, hidden=16, intermediate=16)
    case = Case(shape, pool=_core.Pool([1]))
    batch = random_batch(shape, 4)
    before = case.run(*batch)
    with pytest.raises(OSError, match="cannot map"):  # 2^28 rows of 64 KB
        _core.MoELayer(
            case.pool, **{**GOOD, "top_k": 1 << 16, "intermediate_size": 1 << 15, "max_tokens": 4096, "hidden_size": 1}
        )
    assert np.array_equal(case.run(*batch), before)


def test_nothing_is_printed_when_the_interpreter_ends_with_a_pool():
    code = "import sys; from kt_kernel import _core; sys.kept = _core.Pool([2])"
    result = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_sizes_of_packed_experts():
    """Bytes per weight: 2, 1, 0.5 and 0.516, with row scales, and padding to panels of 16 rows and depths of 64."""
    sizes = {
        name: layer(
            format=name, hidden_size=512, intermediate_size=256, group_size=group_size(name)
        ).packed_bytes_per_expert
        for name in FORMATS
    }
    weights, rows = 3 * 512 * 256, 2 * 256 + 512
    assert sizes["bf16"] == 2 * weights
    assert sizes["int8"] == weights + 4 * rows
    assert sizes["int4"] == weights // 2 + 4 * rows
    # 16 words of steps for 512 k, or for the 256 that down has
    assert sizes["int4g"] == weights // 2 + 2 * 256 * 512 // 128 + 512 * 4 + 4 * rows
    for name, bits, scale_bytes, group in (
        ("fp8", 8, 4, 128),
        ("fp8c", 8, 0, 256),
        ("mxfp8", 8, 1, 32),
        ("mxfp4", 4, 1, 32),
        ("nvfp4", 4, 1, 16),
        ("rawint4", 4, 2, 32),
        ("int4z", 4, 3, 64),
    ):
        head = -(-256 // group * 16 * scale_bytes // 64) * 64  # of 16 rows and 256 columns
        factors = 4 * rows if name in ("fp8c", "nvfp4") else 0
        assert sizes[name] == weights * bits // 8 + weights // 4096 * head + factors
