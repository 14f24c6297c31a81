"""The mask of experts on the GPU: read at every call, changed in place; and experts that are never loaded."""

import subprocess
import sys

import pytest
from wrapper_cases import METHODS, SHAPE, assert_right, batch, loaded, make, same_bits, tensors, torch


def mask_of(*on_gpu: int) -> "torch.Tensor":
    mask = torch.zeros(SHAPE.experts, dtype=torch.bool)
    mask[list(on_gpu)] = True
    return mask


def equivalent(wrapper, on_gpu, x, ids, weights) -> "torch.Tensor":
    """The same without a mask: masked ids are no experts."""
    gone = ids.clone()
    for expert in on_gpu:
        gone[ids == expert] = -1
    assert not wrapper.gpu_experts_mask.any()
    return wrapper.forward(x, gone, weights)


@pytest.mark.parametrize("method", METHODS)
def test_changes_between_calls(method):
    wrapper, plain, tokens = loaded(SHAPE, method), loaded(SHAPE, method), batch(SHAPE, 10)
    mask = wrapper.gpu_experts_mask
    mask.copy_(mask_of(1, 2))
    assert same_bits(wrapper.forward(*tokens), equivalent(plain, [1, 2], *tokens))
    mask.copy_(torch.tensor([False, False, False, True, True, False]))
    assert same_bits(wrapper.forward(*tokens), equivalent(plain, [3, 4], *tokens))
    mask[0] = True
    assert same_bits(wrapper.forward(*tokens), equivalent(plain, [0, 3, 4], *tokens))
    mask.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 1.0]))  # of another type
    assert same_bits(wrapper.forward(*tokens), equivalent(plain, [0, 5], *tokens))
    mask.fill_(True)
    assert (wrapper.forward(*tokens) == 0).all()
    mask.zero_()
    assert same_bits(wrapper.forward(*tokens), plain.forward(*tokens))


def test_the_mask_of_one_wrapper_is_its_own():
    one, two, tokens = loaded(), loaded(layer_idx=1), batch()
    expected = two.forward(*tokens)
    one.gpu_experts_mask.fill_(True)
    assert same_bits(two.forward(*tokens), expected)


def test_the_mask_may_outlive_the_wrapper():
    wrapper = loaded()
    mask = wrapper.gpu_experts_mask
    mask.copy_(mask_of(2))
    del wrapper
    junk = [torch.full((1 << 16,), 255, dtype=torch.uint8) for _ in range(64)]
    assert mask.tolist() == mask_of(2).tolist()
    assert len(junk) == 64


@pytest.mark.parametrize("method", METHODS)
class TestSkippedExperts:
    def test_they_are_not_loaded(self, method, tmp_path):
        placed = {"gpu_experts_mask": mask_of(0, 4), "skip_gpu_experts": True}
        wrapper, tokens = loaded(SHAPE, method, **placed), batch(SHAPE, 10)
        assert wrapper.moe.loaded_experts == SHAPE.experts - 2
        plain = loaded(SHAPE, method)
        assert plain.moe.loaded_experts == SHAPE.experts
        assert same_bits(wrapper.forward(*tokens), equivalent(plain, [0, 4], *tokens))
        if method == "BF16":
            return
        make(SHAPE, method, weight_path=tmp_path, cpu_save=True).load_weights_from_tensors(*tensors())
        from_files = make(SHAPE, method, weight_path=tmp_path, **placed)
        from_files.load_weights()
        assert from_files.moe.loaded_experts == SHAPE.experts - 2
        assert same_bits(from_files.forward(*tokens), wrapper.forward(*tokens))

    def test_one_that_is_needed_is_an_error_at_sync_and_nothing_is_lost(self, method):
        wrapper = loaded(SHAPE, method, gpu_experts_mask=mask_of(0, 4), skip_gpu_experts=True)
        tokens = batch(SHAPE, 10)
        expected = wrapper.forward(*tokens)
        wrapper.gpu_experts_mask[4] = False
        for _ in range(2):
            wrapper.submit_forward(*tokens)
            with pytest.raises(ValueError, match="expert 4 of this layer has no weights; load them, or mask"):
                wrapper.sync_forward(tokens[0])
        without = tokens[1].clone()
        without[without == 4] = 1
        assert_right(wrapper, wrapper.forward(tokens[0], without, tokens[2]), tokens[0], without, tokens[2])
        wrapper.gpu_experts_mask[4] = True
        assert same_bits(wrapper.forward(*tokens), expected)

    def test_they_can_be_loaded_later(self, method):
        wrapper = loaded(SHAPE, method, gpu_experts_mask=mask_of(0, 4), skip_gpu_experts=True)
        wrapper.gpu_experts_mask.zero_()
        wrapper.load_weights_from_tensors(*tensors())
        tokens = batch(SHAPE, 10)
        assert same_bits(wrapper.forward(*tokens), loaded(SHAPE, method).forward(*tokens))


@pytest.mark.parametrize(
    ("variable", "argument", "skips"),
    [
        ("1", None, True),
        ("on", None, True),
        ("0", None, False),
        ("", None, False),
        ("1", False, False),
        ("0", True, True),
    ],
)
def test_the_variable_and_the_argument(monkeypatch, variable, argument, skips):
    monkeypatch.setenv("KT_KERNEL_SKIP_GPU_EXPERTS", variable)
    wrapper = loaded(num_gpu_experts=2, skip_gpu_experts=argument)
    assert wrapper.moe.loaded_experts == SHAPE.experts - (2 if skips else 0)


MEASURE = """
import sys, torch
from kt_kernel import KTMoEWrapper

def resident():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Rss:"))

given = [torch.ones(size, dtype=torch.bfloat16).expand(8, *size) for size in ((1024, 1024),) * 3]
KTMoEWrapper(0, 1, 1, 64, 64, cpuinfer_threads=1).load_weights_from_tensors(*[part[:1, :64, :64] for part in given])
wrapper = KTMoEWrapper(0, 8, 2, 1024, 1024, 6, 1, 1, chunked_prefill_size=8, method="AMXINT8", skip_gpu_experts=True)
before = resident()
wrapper.load_weights_from_tensors(*given)
print(resident() - before, wrapper.moe.packed_bytes_per_expert)
"""


def test_skipped_experts_take_no_memory():
    result = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=120)
    growth, expert = map(int, result.stdout.split())
    assert 2 * expert <= growth <= 2.2 * expert + (4 << 20)  # pages are huge, and others grow a little too
