"""Experts that are added one layer later: over a pass nothing is lost, and nothing is added twice."""

import pytest
from layer_reference import Shape
from wrapper_cases import METHODS, batch, loaded, same_bits, torch

from kt_kernel import KTMoEWrapper

# So many experts that a few tokens do not protect all of them.
SHAPE = Shape(experts=24, top_k=3, hidden=80, intermediate=130)
LAYERS = (3, 4, 9, 20)  # dense layers lie between
_ROUNDING = 2.0**-8  # largest error of rounding to bf16, relative to what comes out
_F32 = 2.0**-18  # of sums in another order, relative to the largest value: a few ulps


def make_model(
    deferred: int, method: str = "BF16", path: str = "/model", seed: int = 0, **options
) -> list[KTMoEWrapper]:
    return [
        loaded(
            SHAPE,
            method,
            seed=seed + layer,
            layer_idx=layer,
            weight_path=path,
            max_deferred_experts_per_token=deferred,
            **options,
        )
        for layer in LAYERS
    ]


def run_pass(model: list[KTMoEWrapper], tokens) -> "list[torch.Tensor]":
    return [wrapper.forward(*tokens) for wrapper in model]


def deferred_parts(plain: list[KTMoEWrapper], tokens, deferred: int) -> "list[torch.Tensor]":
    """What each layer but the last leaves to the next, by calls of their own; the last leaves nothing."""
    x, ids, weights = tokens
    parts = []
    for wrapper in plain[:-1]:
        _, later = wrapper.select_deferred_experts(ids, weights, SHAPE.top_k - deferred)
        parts.append(wrapper.forward(x, later, weights))
    return [*parts, torch.zeros_like(x)]


def rounding(*rounded: "torch.Tensor") -> "torch.Tensor":
    """How far a sum may be off when these took part in it after they were rounded."""
    return sum(_ROUNDING * part.double().abs() + _F32 * part.double().abs().max() for part in rounded)


def check_pass(outs, plain, tokens, deferred: int) -> None:
    """Each layer: what it does at once, and what the one before left; one rounding."""
    x, ids, weights = tokens
    parts = deferred_parts(plain, tokens, deferred)
    assert all((part != 0).any() == (deferred > 0) for part in parts[:-1])
    before = torch.zeros_like(x)
    for layer, (wrapper, out, part) in enumerate(zip(plain, outs, parts, strict=True)):
        last = layer == len(plain) - 1
        now = ids if last else wrapper.select_deferred_experts(ids, weights, SHAPE.top_k - deferred)[0]
        own = wrapper.forward(x, now, weights)
        difference = out.double() - own.double() - before.double()
        assert (difference.abs() <= rounding(own, out)).all(), f"layer {layer}"
        before = part


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    return request.param


@pytest.fixture(scope="module")
def plain(method):
    return make_model(0, method, path="/plain")


@pytest.mark.parametrize("deferred", [0, 1, 2, SHAPE.top_k])
def test_each_layer_gets_what_the_one_before_left(method, plain, deferred):
    model = make_model(deferred, method)
    for tokens in (batch(SHAPE, 1), batch(SHAPE, 2), batch(SHAPE, 10)):
        outs = run_pass(model, tokens)
        check_pass(outs, plain, tokens, deferred)
        if deferred == 0:
            assert all(map(same_bits, outs, run_pass(plain, tokens)))


@pytest.mark.parametrize("deferred", [1, SHAPE.top_k])
def test_the_sum_over_layers_stays(method, plain, deferred):
    """Every output is rounded once on either side, and every deferred part once more."""
    model, tokens = make_model(deferred, method), batch(SHAPE, 9)
    outs, expected = run_pass(model, tokens), run_pass(plain, tokens)
    difference = sum(out.double() for out in outs) - sum(out.double() for out in expected)
    bound = rounding(*outs, *expected, *deferred_parts(plain, tokens, deferred))
    assert (difference.abs() <= bound).all()
    assert not same_bits(outs[0], expected[0])  # something was deferred


def test_all_deferred(method, plain):
    """The first layer gives zeros, the next exactly what the first would have given, the last both."""
    model, tokens = make_model(SHAPE.top_k, method), batch(SHAPE, 9)
    outs, expected = run_pass(model, tokens), run_pass(plain, tokens)
    assert (outs[0] == 0).all()
    for layer in (1, 2):
        assert same_bits(outs[layer], expected[layer - 1])
    difference = outs[3].double() - expected[2].double() - expected[3].double()
    assert (difference.abs() <= rounding(outs[3], expected[3])).all()


class TestPasses:
    def test_the_last_layer_flushes_and_the_next_pass_starts_clean(self):
        model, tokens = make_model(2), batch(SHAPE, 9)
        first = run_pass(model, tokens)
        for _ in range(3):
            assert all(map(same_bits, run_pass(model, tokens), first))

    def test_the_batch_may_change_between_passes(self):
        model, fresh = make_model(2), make_model(2, path="/fresh")
        for tokens in (40, 1, 9, 33, 2):
            given = batch(SHAPE, tokens)
            outs = run_pass(model, given)
            expected = run_pass([*fresh], given)
            assert all(map(same_bits, outs, expected))

    @pytest.mark.parametrize("done", [1, 2, 3])
    @pytest.mark.parametrize("tokens", [9, 4])
    def test_a_pass_that_is_given_up_leaves_nothing(self, done, tokens):
        model, given = make_model(2), batch(SHAPE, tokens)
        expected = run_pass(model, given)
        run_pass(model[:done], batch(SHAPE, 9, seed=5))
        assert all(map(same_bits, run_pass(model, given), expected))

    def test_a_pass_that_is_given_up_between_submit_and_sync(self):
        model, tokens = make_model(2), batch(SHAPE, 9)
        expected = run_pass(model, tokens)
        model[0].forward(*batch(SHAPE, 9, seed=5))
        model[1].submit_forward(*batch(SHAPE, 9, seed=6))
        assert all(map(same_bits, run_pass(model, tokens), expected))

    def test_another_batch_in_the_middle_is_an_error(self):
        model, tokens = make_model(2), batch(SHAPE, 9)
        expected = run_pass(model, tokens)
        model[0].forward(*tokens)
        with pytest.raises(ValueError, match=r"layer 3 deferred experts of 9 tokens .* layer 4 was called with 4"):
            model[1].forward(*batch(SHAPE, 4))
        assert all(map(same_bits, run_pass(model, tokens), expected))

    def test_calls_may_be_submitted_ahead(self):
        """The queue keeps their order, so layer 4 finds what layer 3 leaves."""
        model, tokens = make_model(2), batch(SHAPE, 9)
        expected = run_pass(model, tokens)
        for wrapper in model:
            wrapper.submit_forward(*tokens)
        outs = [wrapper.sync_forward(tokens[0]) for wrapper in reversed(model)]
        assert all(map(same_bits, reversed(outs), expected))

    def test_buffers_may_be_cleared_in_the_middle(self):
        model, tokens = make_model(2), batch(SHAPE, 9)
        expected = run_pass(model, tokens)
        outs = []
        for wrapper in model:
            KTMoEWrapper.clear_buffer_cache()
            wrapper.submit_forward(*tokens)
            KTMoEWrapper.clear_buffer_cache()
            outs.append(wrapper.sync_forward(tokens[0]))
        assert all(map(same_bits, outs, expected))


class TestIds:
    def test_ids_that_are_no_experts(self, method, plain):
        x, ids, weights = batch(SHAPE, 9)
        ids[0] = -1
        ids[1, 0], ids[2, 1], ids[3, 2] = -1, SHAPE.experts, -9
        model = make_model(1, method)
        for kind in (torch.int64, torch.int32):
            outs = run_pass(model, (x, ids.to(kind), weights))
            check_pass(outs, plain, (x, ids, weights), 1)
            assert all((out[0] == 0).all() for out in outs)

    def test_masked_experts_are_protected_like_others(self):
        model, plain, tokens = make_model(1), make_model(0, path="/plain"), batch(SHAPE, 9)
        for wrapper in [*model, *plain]:
            wrapper.gpu_experts_mask[:3] = True
        check_pass(run_pass(model, tokens), plain, tokens, 1)


def test_the_last_layer_defers_nothing():
    """Whatever it was given: there is no layer after it."""
    tokens = batch(SHAPE, 9)
    alone = loaded(SHAPE, max_deferred_experts_per_token=2, weight_path="/alone")
    assert same_bits(alone.forward(*tokens), loaded(SHAPE, weight_path="/other").forward(*tokens))


def test_layers_with_and_without_deferral():
    """Engines make the last layer with 0; here also one in the middle."""
    tokens, plain = batch(SHAPE, 9), make_model(0, path="/plain")
    model = [
        loaded(SHAPE, seed=layer, layer_idx=layer, weight_path="/mixed", max_deferred_experts_per_token=deferred)
        for layer, deferred in zip(LAYERS, (SHAPE.top_k, 0, SHAPE.top_k, 0), strict=True)
    ]
    outs, expected = run_pass(model, tokens), run_pass(plain, tokens)
    assert (outs[0] == 0).all()
    assert (outs[2] == 0).all()
    for layer in (1, 3):
        difference = outs[layer].double() - expected[layer - 1].double() - expected[layer].double()
        assert (difference.abs() <= rounding(outs[layer], expected[layer])).all()


def test_with_subpools():
    tokens = batch(SHAPE, 9)
    options = {"cpuinfer_threads": 2, "threadpool_count": 2}
    check_pass(run_pass(make_model(1, **options), tokens), make_model(0, path="/plain", **options), tokens, 1)


def test_layers_of_other_sizes_are_of_another_model():
    """A draft model in the same folder has no part in the passes of the large one."""
    model, tokens = make_model(2), batch(SHAPE, 9)
    expected = run_pass(model, tokens)
    other_shape = Shape(SHAPE.experts, SHAPE.top_k, 64, 128)
    other = loaded(other_shape, layer_idx=5, weight_path="/model", max_deferred_experts_per_token=2)
    outs = []
    for wrapper in model:
        outs.append(wrapper.forward(*tokens))
        other.forward(*batch(other_shape, 3))
    assert all(map(same_bits, outs, expected))


def test_an_error_in_the_deferred_part_is_raised_by_the_next_layer():
    tokens = batch(SHAPE, 9)
    options = {"max_deferred_experts_per_token": SHAPE.top_k, "num_gpu_experts": 12, "skip_gpu_experts": True}
    model = [loaded(SHAPE, layer_idx=layer, weight_path="/missing", **options) for layer in (0, 1)]
    model[0].gpu_experts_mask.zero_()
    model[0].forward(*tokens)
    with pytest.raises(ValueError, match="has no weights"):
        model[1].forward(*tokens)
