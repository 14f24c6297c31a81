"""Calls in the order of CUDA streams."""

import time

import pytest
import torch
from hybrid_layer import EXPERTS, HIDDEN, LIMITS, TOP_K, GpuExperts, error, make_tokens, make_weights, make_wrapper

HOT = torch.arange(EXPERTS) % 3 == 0


@pytest.fixture(scope="module")
def weights():
    return make_weights()


@pytest.fixture(scope="module")
def experts(weights):
    return GpuExperts(weights)


@pytest.mark.parametrize("method", LIMITS)
@pytest.mark.parametrize("count", [1, 5, 33, 600, 5000])  # 5000: more than a copy kernel and a pass take
def test_hot_experts_on_the_gpu_and_cold_ones_on_the_cpu_are_the_whole_layer(weights, experts, method, count):
    wrapper = make_wrapper(weights, method, HOT)
    x, ids, scores = make_tokens(count)
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(3):
        wrapper.submit_forward(x, ids, scores, stream)
        hot = experts(x, ids, scores, HOT.cuda())
        cold = wrapper.sync_forward(x, stream)
        assert cold.shape == x.shape
        assert cold.dtype == x.dtype
        assert cold.is_cuda
        assert error(hot + cold, experts(x, ids, scores)) < LIMITS[method]
    assert error(hot, experts(x, ids, scores)) > 0.2  # the CPU's part is needed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_types_and_layouts(weights, experts, dtype, id_type):
    wrapper = make_wrapper(weights)
    x, ids, scores = make_tokens(6)
    wide = torch.zeros(6, 2 * HIDDEN, device="cuda", dtype=dtype)
    wide[:, ::2] = x.to(dtype)
    result = wrapper.forward(wide[:, ::2].view(2, 3, HIDDEN), ids.to(id_type), scores.double(), None)
    assert result.dtype == dtype
    assert error(result, experts(x, ids, scores)) < LIMITS["BF16"]


def test_what_happens_to_the_inputs_after_submit_does_not_matter(weights, experts):
    wrapper = make_wrapper(weights)
    x, ids, scores = make_tokens(8)
    expected = experts(x, ids, scores)
    wrapper.submit_forward(x, ids, scores, torch.cuda.current_stream().cuda_stream)
    x.zero_(), ids.fill_(-1), scores.zero_()
    result = wrapper.sync_forward(x, torch.cuda.current_stream().cuda_stream)
    assert error(result, expected) < LIMITS["BF16"]


def test_the_host_does_not_wait(weights):
    wrapper = make_wrapper(weights)
    x, ids, scores = make_tokens(4096)
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        wrapper.submit_forward(x, ids, scores, stream)
        wrapper.sync_forward(x, stream)
        returned = time.perf_counter() - start
        torch.cuda.synchronize()
        whole = time.perf_counter() - start
    assert returned < whole / 3


def test_streams_given_as_numbers_objects_or_not_at_all(weights, experts):
    wrapper = make_wrapper(weights)
    x, ids, scores = make_tokens(3)
    expected = experts(x, ids, scores)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for given in (side, side.cuda_stream, 0, None):
        result = wrapper.forward(x, ids, scores, given)
        torch.cuda.synchronize()
        assert error(result, expected) < LIMITS["BF16"]


def test_two_models_on_two_streams_at_once(weights, experts):
    other = make_weights(7)
    wrappers = [make_wrapper(weights, path="/a"), make_wrapper(other, "AMXINT8", path="/b")]
    references = [experts, GpuExperts(other)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    tokens = [make_tokens(17, 3), make_tokens(17, 4)]
    torch.cuda.synchronize()
    for _ in range(20):
        for wrapper, stream, (x, ids, scores) in zip(wrappers, streams, tokens, strict=True):
            wrapper.submit_forward(x, ids, scores, stream)
        results = [w.sync_forward(t[0], s) for w, s, t in zip(wrappers, streams, tokens, strict=True)]
    torch.cuda.synchronize()
    for result, reference, token, method in zip(results, references, tokens, ("BF16", "AMXINT8"), strict=True):
        assert error(result, reference(*token)) < LIMITS[method]


def test_the_mask_is_read_when_the_call_runs(weights, experts):
    wrapper = make_wrapper(weights)
    x, ids, scores = make_tokens(9)
    assert error(wrapper.forward(x, ids, scores), experts(x, ids, scores)) < LIMITS["BF16"]
    torch.cuda.synchronize()
    wrapper.gpu_experts_mask.copy_(HOT)
    cold = experts(x, ids, scores, (~HOT).cuda())
    assert error(wrapper.forward(x, ids, scores), cold) < LIMITS["BF16"]
    torch.cuda.synchronize()
    wrapper.gpu_experts_mask.fill_(True)
    assert wrapper.forward(x, ids, scores).abs().max() == 0


def test_deferred_experts_arrive_one_layer_later(weights, experts):
    layers = [make_wrapper(weights, layer_idx=i, path="/deferred", max_deferred_experts_per_token=2) for i in (3, 5, 6)]
    x, ids, scores = make_tokens(12)
    results = [layer.forward(x, ids, scores) for layer in layers]
    whole = experts(x, ids, scores)
    assert error(sum(r.float() for r in results), 3 * whole) < LIMITS["BF16"]
    assert error(results[0], whole) > 0.02  # something was left for later


def test_an_error_in_a_call_is_raised_once_and_gives_nan(weights):
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[2] = True
    wrapper = make_wrapper(weights, mask=mask, skip_gpu_experts=True)
    x, ids, scores = make_tokens(4)
    ids[0, 0] = 2
    wrapper.gpu_experts_mask.fill_(False)
    results = []

    def call_twice():
        for _ in range(2):  # the first may have its result on the way before the CPU has looked at it
            results.append(wrapper.forward(x, ids, scores))
            torch.cuda.synchronize()

    with pytest.raises(ValueError, match="expert 2"):
        call_twice()
    assert all(result.isnan().all() for result in results)
    wrapper.gpu_experts_mask.copy_(mask)
    torch.cuda.synchronize()
    result = wrapper.forward(x, ids, scores)
    torch.cuda.synchronize()
    assert result.isfinite().all()


def test_wrong_arguments(weights):
    wrapper = make_wrapper(weights)
    x, ids, scores = make_tokens(4)
    with pytest.raises(ValueError, match="topk_ids is on cpu"):
        wrapper.submit_forward(x, ids.cpu(), scores)
    with pytest.raises(ValueError, match="nothing was submitted"):
        wrapper.sync_forward(x)
    wrapper.submit_forward(x, ids, scores, torch.cuda.Stream())
    with pytest.raises(ValueError, match="same cuda_stream"):
        wrapper.sync_forward(x)
    wrapper.submit_forward(x, ids, scores)
    with pytest.raises(ValueError, match="CPU tensor"):
        wrapper.sync_forward(x.cpu())
    with pytest.raises(ValueError, match="4 tokens were submitted"):
        wrapper.sync_forward(x[:2])
    with pytest.raises(ValueError, match="cuda_stream"):
        wrapper.submit_forward(x.cpu(), ids.cpu(), scores.cpu(), torch.cuda.Stream())
    assert wrapper.forward(x, ids, scores).isfinite().all()


def test_no_tokens(weights):
    wrapper = make_wrapper(weights)
    x, ids, scores = make_tokens(0)
    assert wrapper.forward(x, ids, scores).shape == (0, HIDDEN)


def test_the_older_interface_in_a_stream(weights, experts):
    from kt_kernel import kt_kernel_ext

    cpu_infer = kt_kernel_ext.CPUInfer(2)
    assert hasattr(cpu_infer, "submit_with_cuda_stream")
    config = kt_kernel_ext.moe.MOEConfig(EXPERTS, TOP_K, HIDDEN, weights[0].shape[1])
    config.pool = cpu_infer.backend_
    config.max_len = 64
    config.gate_proj, config.up_proj, config.down_proj = (w.data_ptr() for w in weights)
    layer = kt_kernel_ext.moe.AMXBF16_MOE(config)
    cpu_infer.submit(layer.load_weights_task())
    x, ids, scores = make_tokens(7)
    host = [
        torch.empty(t.shape, dtype=d, pin_memory=True)
        for t, d in ((x, torch.bfloat16), (ids, torch.int64), (scores, torch.float32), (x, torch.bfloat16))
    ]
    count = torch.tensor([7], dtype=torch.int32)
    stream = torch.cuda.current_stream().cuda_stream
    for to, source in zip(host, (x, ids, scores), strict=False):
        to.copy_(source, non_blocking=True)
    hidden, host_ids, host_scores, output = (t.data_ptr() for t in host)
    task = layer.forward_task(count.data_ptr(), TOP_K, host_ids, host_scores, hidden, output)
    cpu_infer.submit_with_cuda_stream(stream, task)
    cpu_infer.sync_with_cuda_stream(stream)
    result = host[3].cuda(non_blocking=True)
    assert error(result, experts(x, ids, scores)) < LIMITS["BF16"]
    cpu_infer.sync()
