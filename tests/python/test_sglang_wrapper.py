"""Released SGLang, stock and fork, unchanged, with this kt_kernel: their own kt_ep_wrapper.py drives our wrapper."""

import numpy as np
import pytest
from layer_reference import Shape, random_batch, random_expert
from sglang_file import FORK, STOCK, Layer, arguments, load, one_thread_of_torch, torch, write_checkpoint
from wrapper_cases import tensor_of_bits

SHAPE = Shape(experts=8, top_k=3, hidden=128, intermediate=192)
LAYERS = 3
# Relative error of a whole layer against float32 with the weights of the file; without one of 8 experts 0.3 and more.
LIMITS = {"BF16": 0.01, "AMXINT8": 0.03}
DROPPED = 0.2

release = pytest.mark.parametrize("release", [*STOCK, FORK])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPE, LAYERS)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with one_thread_of_torch():
        yield


@pytest.fixture
def engine(monkeypatch, checkpoint):
    """(release, options of the server) -> its layers."""

    def make(release: str, rank: int = 0, **options) -> list[Layer]:
        args = arguments(SHAPE, LAYERS, checkpoint, release=release, **options)
        module = load(monkeypatch, release, SHAPE, args, rank)
        experts = [[random_expert(SHAPE, layer, expert) for expert in range(SHAPE.experts)] for layer in range(LAYERS)]
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # as the engine has it while it makes a model
        try:
            return [Layer(module, args, index, SHAPE, experts[index]) for index in range(LAYERS)]
        finally:
            torch.set_default_dtype(default)

    return make


def tokens(count: int, seed: int = 0, kind=torch.int32):
    x, ids, weights = random_batch(SHAPE, count, seed)
    return tensor_of_bits(x), torch.from_numpy(ids).to(kind), torch.from_numpy(weights)


@release
@pytest.mark.parametrize("method", LIMITS)
def test_a_layer_is_the_whole_layer(engine, release, method):
    for layer in engine(release, kt_method=method):
        for count, kind in ((1, torch.int32), (7, torch.int64), (64, torch.int32)):
            assert layer.error(*tokens(count, kind=kind)) < LIMITS[method]


@release
def test_an_expert_that_is_left_out_is_noticed(engine, release):
    """The control: what the test above measures must grow when one expert is missing on our side."""
    layer = engine(release)[0]
    layer.method.wrapper.gpu_experts_mask[5] = True
    assert layer.error(*tokens(64)) > DROPPED


@release
@pytest.mark.parametrize("count", [0, SHAPE.experts])
def test_all_experts_on_one_side(engine, release, count):
    layers = engine(release, kt_num_gpu_experts=count)
    assert layers[0].method.wrapper.num_gpu_experts == count
    assert layers[0].error(*tokens(7)) < LIMITS["BF16"]


@release
def test_other_ranks_have_no_experts_on_the_cpu(engine, release):
    """One rank computes them, the others add nothing: the sum over the ranks is the layer."""
    given = tokens(7)
    first, second = engine(release)[0], engine(release, rank=1)[0]
    assert second.method.wrapper is None
    own = second(*given)
    assert (own - first.expected(*given)).norm() > DROPPED * own.norm()
    assert first.error(*given) < LIMITS["BF16"]


@release
def test_deferred_experts_are_not_lost_in_the_last_layer(engine, release):
    """0.5.17 does not know how many layers there are and lets the last defer too; a pass must not miss anything."""
    deferred = 2
    layers = engine(release, kt_max_deferred_experts_per_token=deferred)
    asked = [layer.method.wrapper.max_deferred_experts_per_token for layer in layers]
    assert asked == [deferred, deferred, deferred if release == "sglang-0.5.17" else 0]
    given = tokens(2)
    outs = [layer(*given) for layer in layers]
    whole = [layer.expected(*given) for layer in layers]
    assert (outs[0] - whole[0]).norm() > 0.05 * whole[0].norm()  # something was deferred
    assert (sum(outs) - sum(whole)).norm() < LIMITS["BF16"] * sum(whole).norm()


class TestFork:
    @pytest.mark.parametrize("strategy", ["uniform", "front-loading", "random"])
    def test_experts_anywhere(self, engine, strategy):
        layers = engine(FORK, kt_expert_placement_strategy=strategy, kt_num_gpu_experts=3)
        assert sum(layer.method.wrapper.num_gpu_experts for layer in layers) == 3 * LAYERS
        for layer in layers:
            assert layer.error(*tokens(7)) < LIMITS["BF16"]

    def test_the_most_used_by_our_function(self, engine, tmp_path):
        """Of a file of the recorder: counts [steps, layers, experts]."""
        counts = np.zeros((2, LAYERS, SHAPE.experts), np.int64)
        counts[1, 0, 6], counts[0, 2, [1, 4]] = 9, (8, 7)
        torch.save({"logical_count": torch.from_numpy(counts)}, tmp_path / "counts.pt")
        layers = engine(
            FORK,
            kt_expert_placement_strategy="frequency",
            init_expert_location=str(tmp_path / "counts.pt"),
            kt_num_gpu_experts=1,
        )
        on_gpu = [layer.method.wrapper.gpu_experts_mask.nonzero().flatten().tolist() for layer in layers]
        assert on_gpu == [[6], [], [1, 4]]
        for layer in layers:
            assert layer.error(*tokens(7)) < LIMITS["BF16"]

    def test_a_new_mask_in_place(self, engine, monkeypatch):
        """As its dynamic update does it; the experts it moved are then ours."""
        layer, given = engine(FORK)[0], tokens(64)
        update = layer.method.apply.__func__.__globals__["update_kt_wrapper_masks"]
        none = torch.zeros(SHAPE.experts, dtype=torch.bool)
        update(layer.method.wrapper, none)
        twice = layer(*given) - layer.expected(*given)  # experts 0 and 1 are computed on both sides
        x, ids, weights = given
        own = layer.expected(x, torch.where(ids < 2, ids, -1), weights)
        assert (twice - own).norm() < 0.05 * own.norm()
