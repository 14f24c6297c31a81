"""Both generations of the constructor, the calls that engines make, and what the arguments become."""

import os

import numpy as np
import pytest
from layer_reference import Shape
from wrapper_cases import assert_right, batch, loaded, make, tensors, torch

from kt_kernel import KTMoEWrapper, _core

# In their order, by position: layer_idx, E, K, H, I.
FIVE = (3, 8, 2, 64, 128)
SHAPE = Shape(experts=8, top_k=2, hidden=64, intermediate=128)
MASK = [True, False, False, True, False, False, True, False]


def mask_of(wrapper) -> list[bool]:
    return wrapper.gpu_experts_mask.tolist()


class TestPlacement:
    @pytest.mark.parametrize("count", [0, 3, 8, np.int64(3), "torch"])
    def test_a_count_means_the_first_experts(self, count):
        count = torch.tensor(3) if isinstance(count, str) else count
        expected = [expert < int(count) for expert in range(8)]
        for wrapper in (KTMoEWrapper(*FIVE, num_gpu_experts=count), KTMoEWrapper(*FIVE, int(count))):
            assert mask_of(wrapper) == expected
            assert wrapper.num_gpu_experts == int(count)

    @pytest.mark.parametrize("convert", [list, tuple, np.array, "torch"])
    def test_a_mask_is_copied(self, convert):
        mask = torch.tensor(MASK) if convert == "torch" else convert(MASK)
        wrappers = KTMoEWrapper(*FIVE, gpu_experts_mask=mask), KTMoEWrapper(*FIVE, mask)
        if not isinstance(mask, tuple):
            mask[1] = True
        for wrapper in wrappers:
            assert mask_of(wrapper) == MASK
            assert wrapper.num_gpu_experts == 3

    def test_a_mask_may_be_a_view(self):
        assert mask_of(KTMoEWrapper(*FIVE, torch.tensor(MASK).repeat_interleave(2)[::2])) == MASK

    def test_nothing_is_on_the_gpu_without_either(self):
        for wrapper in (KTMoEWrapper(*FIVE), KTMoEWrapper(*FIVE, None), KTMoEWrapper(*FIVE, gpu_experts_mask=None)):
            assert mask_of(wrapper) == [False] * 8
            assert wrapper.num_gpu_experts == 0

    def test_the_mask_is_a_bool_tensor_on_the_cpu(self):
        mask = KTMoEWrapper(*FIVE, 2).gpu_experts_mask
        assert (mask.dtype, mask.device.type, tuple(mask.shape)) == (torch.bool, "cpu", (8,))


def test_every_argument_by_position():
    wrapper = KTMoEWrapper(
        *FIVE, torch.tensor(MASK), 2, 1, "weights", 32, False, 1, "AMXINT8", [0], "inference", swiglu_limit=0.0
    )
    assert wrapper.layer_idx == 3
    assert (wrapper.num_experts, wrapper.num_experts_per_tok) == (8, 2)
    assert (wrapper.hidden_size, wrapper.moe_intermediate_size) == (64, 128)
    assert (wrapper.weight_path, wrapper.chunked_prefill_size, wrapper.cpu_save) == ("weights", 32, False)
    assert (wrapper.max_deferred_experts_per_token, wrapper.method) == (1, "AMXINT8")
    assert wrapper.moe is None


# What engines pass, by name.
MAINLINE = {
    "layer_idx": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 128,
    "num_gpu_experts": 2,
    "cpuinfer_threads": 2,
    "threadpool_count": 2,
    "weight_path": "/nowhere",
    "chunked_prefill_size": 32,
    "method": "AMXINT4",
    "max_deferred_experts_per_token": 0,
}
BRANCH = {
    **{name: value for name, value in MAINLINE.items() if name != "num_gpu_experts"},
    "gpu_experts_mask": None,
    "numa_nodes": None,
    "swiglu_limit": 0.0,
    "swiglu_alpha": 0.0,
    "max_deferred_experts_per_token": None,
}


@pytest.mark.parametrize("arguments", [MAINLINE, BRANCH])
def test_the_calls_of_engines(arguments):
    wrapper = KTMoEWrapper(**arguments)
    wrapper.load_weights_from_tensors(*tensors(SHAPE))
    assert wrapper.num_gpu_experts == arguments.get("num_gpu_experts", 0)
    assert wrapper.max_deferred_experts_per_token == 0
    tokens = batch(SHAPE, 5)
    assert_right(wrapper, wrapper.forward(*tokens, 0), *tokens)


def test_the_devices_and_types_that_loaders_set_do_not_matter():
    """Models are made under such settings; what a wrapper makes must not follow them."""
    expected = loaded(SHAPE, "AMXINT8").forward(*batch(SHAPE, 5))
    old = torch.get_default_dtype()
    weights, tokens = tensors(SHAPE), batch(SHAPE, 5)
    mask = torch.zeros(8, dtype=torch.bool)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            for placement in ({"num_gpu_experts": 0}, {"gpu_experts_mask": mask}, {"gpu_experts_mask": [False] * 8}):
                wrapper = make(SHAPE, "AMXINT8", **placement)
                assert wrapper.gpu_experts_mask.device.type == "cpu"
                wrapper.load_weights_from_tensors(*weights, list(range(8)))
                out = wrapper.forward(*tokens)
                immediate, _ = wrapper.select_deferred_experts(tokens[1], tokens[2], 1)
                assert immediate.device.type == "cpu"
                KTMoEWrapper.clear_buffer_cache()
    finally:
        torch.set_default_dtype(old)
    assert out.device.type == "cpu"
    assert torch.equal(out, expected)


def test_defaults():
    wrapper = KTMoEWrapper(0, 8, 2, 64, 128)
    assert wrapper.method == "AMXINT4"
    assert wrapper.chunked_prefill_size is None
    assert (wrapper.cpu_save, wrapper.skip_gpu_experts, wrapper.weight_path) == (False, False, "")
    topology, plan = _core.topology(), wrapper._runtime.plan
    assert len(plan.threads) == len(topology.nodes)
    assert sum(plan.threads) == topology.physical_cores


def test_a_path_of_any_kind(tmp_path):
    assert KTMoEWrapper(*FIVE, weight_path=tmp_path).weight_path == os.fspath(tmp_path)


def test_numbers_of_numpy_are_ints():
    wrapper = KTMoEWrapper(*(np.int32(size) for size in FIVE), chunked_prefill_size=np.int64(4))
    wrapper.load_weights_from_tensors(*tensors(SHAPE))
    assert wrapper.forward(*batch(SHAPE, 4)).shape == (4, 64)


def test_more_threads_than_cpus_are_cut_once_with_a_word(capfd):
    usable = _core.topology().cpus
    for _ in range(2):
        wrapper = KTMoEWrapper(*FIVE, cpuinfer_threads=usable + 17, threadpool_count=1)
    assert sum(wrapper._runtime.plan.threads) == usable
    assert capfd.readouterr().err.count(f"cpuinfer_threads={usable + 17}") == 1


def test_wrappers_of_the_same_threads_share_a_pool():
    one, two, other = (make(cpuinfer_threads=threads) for threads in (2, 2, 1))
    assert one._runtime is two._runtime
    assert one._runtime is not other._runtime


def test_threads_are_spread_and_cpus_are_taken_once():
    plan = KTMoEWrapper(*FIVE, cpuinfer_threads=2, threadpool_count=2)._runtime.plan
    assert plan.threads == (1, 1)
    cpus = [cpu for taken in plan.cpus for cpu in taken]
    assert len(cpus) == len(set(cpus))
