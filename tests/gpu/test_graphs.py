"""Calls captured in CUDA graphs."""

import gc

import pytest
import torch
from hybrid_layer import EXPERTS, LIMITS, GpuExperts, error, make_tokens, make_weights, make_wrapper

from kt_kernel import KTMoEWrapper, runtime

HOT = torch.arange(EXPERTS) % 4 == 1


@pytest.fixture(scope="module")
def weights():
    return make_weights()


@pytest.fixture(scope="module")
def experts(weights):
    return GpuExperts(weights)


class Captured:
    """Layers at one batch size, hot experts between submit and sync, in a graph with tensors of its own."""

    def __init__(self, layers, experts, count: int, warm: bool = True):
        self.x, self.ids, self.scores = make_tokens(count)
        self.hot = HOT.cuda()
        self._layers, self._experts = layers, experts
        if warm:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._run()
            torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self._run()
        self._layers = None

    def _run(self):
        total = torch.zeros_like(self.x, dtype=torch.float32)
        for layer in self._layers:
            stream = torch.cuda.current_stream().cuda_stream
            layer.submit_forward(self.x, self.ids, self.scores, stream)
            hot = self._experts(self.x, self.ids, self.scores, self.hot)
            total += hot + layer.sync_forward(self.x, stream)
        return total

    def replay(self, seed: int):
        for to, new in zip((self.x, self.ids, self.scores), make_tokens(len(self.x), seed), strict=True):
            to.copy_(new)
        self.graph.replay()
        return self.out, self._experts(self.x, self.ids, self.scores)


@pytest.mark.parametrize("method", LIMITS)
def test_several_sizes_replayed_in_turns(weights, experts, method):
    KTMoEWrapper.set_capture_batch_sizes([1, 2, 4, 8])
    layers = [make_wrapper(weights, method, HOT, layer_idx=i, path="/graphs") for i in range(3)]
    graphs = {count: Captured(layers, experts, count) for count in (1, 2, 4, 8, 13)}  # 13 was not announced
    x, ids, scores = make_tokens(6, 99)
    for turn in range(30):
        for count in (1, 8, 2, 13, 4):
            out, whole = graphs[count].replay(100 * turn + count)
            assert error(out, 3 * whole) < LIMITS[method]
        eager = layers[0].forward(x, ids, scores)
        assert error(eager, experts(x, ids, scores, (~HOT).cuda())) < LIMITS[method]


def test_without_a_call_before_the_capture(weights, experts):
    layers = [make_wrapper(weights, mask=HOT)]
    out, whole = Captured(layers, experts, 3, warm=False).replay(5)
    assert error(out, whole) < LIMITS["BF16"]


def test_a_long_prefill_in_a_graph(weights, experts):
    out, whole = Captured([make_wrapper(weights, mask=HOT)], experts, 5000).replay(5)
    assert error(out, whole) < LIMITS["BF16"]


def test_the_mask_may_change_between_replays(weights, experts):
    layer = make_wrapper(weights, mask=HOT)
    graph = Captured([layer], experts, 4)
    out, whole = graph.replay(1)
    assert error(out, whole) < LIMITS["BF16"]
    torch.cuda.synchronize()
    layer.gpu_experts_mask.fill_(True)
    out, _ = graph.replay(2)
    assert error(out, experts(graph.x, graph.ids, graph.scores, HOT.cuda())) < LIMITS["BF16"]


def test_deferral_in_a_graph(weights, experts):
    layers = [
        make_wrapper(weights, mask=HOT, layer_idx=i, path="/deferred-graph", max_deferred_experts_per_token=3)
        for i in (0, 2, 3, 7)
    ]
    graph = Captured(layers, experts, 5)
    for seed in range(20):
        out, whole = graph.replay(seed)
        assert error(out, 4 * whole) < LIMITS["BF16"]


def test_a_graph_outlives_its_wrapper_and_the_cache(weights, experts):
    layer = make_wrapper(weights, mask=HOT, path="/outlived")
    graph = Captured([layer], experts, 4)
    KTMoEWrapper.clear_buffer_cache()
    del layer
    gc.collect()
    filler = [make_wrapper(make_weights(3), path="/filler") for _ in range(2)]
    for seed in range(5):
        out, whole = graph.replay(seed)
        assert error(out, whole) < LIMITS["BF16"]
        filler[0].forward(*make_tokens(4, seed))


def test_memory_of_a_graph_goes_with_it(weights, experts):
    layer = make_wrapper(weights, mask=HOT, path="/freed")
    before = layer._model.session.stages
    graph = Captured([layer], experts, 4)
    graph.replay(1)
    torch.cuda.synchronize()
    assert layer._model.session.stages > before
    held = len(runtime._captured)
    del graph
    gc.collect()
    torch.cuda.synchronize()
    KTMoEWrapper.clear_buffer_cache()
    assert len(runtime._captured) < held
    assert layer._model.session.stages == 0
