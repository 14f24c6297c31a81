"""forward() against fp64, for every method, batch and placement."""

import numpy as np
import pytest
from layer_reference import Activation, Shape, moe, relative_error
from wrapper_cases import (
    CHUNK,
    METHODS,
    SHAPE,
    assert_right,
    batch,
    limit_of,
    loaded,
    make,
    reference,
    same_bits,
    tensors,
    torch,
)

PLACEMENTS = {"none": [], "some": [0, 4], "all": range(SHAPE.experts)}
WITHOUT_ERROR_LIMITS = 9  # tokens from which on a mean error says something


@pytest.fixture(scope="module", params=METHODS)
def wrapper(request):
    return loaded(SHAPE, request.param)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 9, 10, 33, CHUNK])
def test_numbers(wrapper, tokens, placement):
    on_gpu = torch.zeros(SHAPE.experts, dtype=torch.bool)
    on_gpu[list(PLACEMENTS[placement])] = True
    wrapper.gpu_experts_mask.copy_(on_gpu)
    x, ids, weights = batch(SHAPE, tokens)
    out = wrapper.forward(x, ids, weights)
    assert (out.dtype, tuple(out.shape)) == (torch.bfloat16, (tokens, SHAPE.hidden))
    assert_right(wrapper, out, x, ids, weights)
    without = on_gpu[ids].all(dim=1)
    assert torch.equal(out[without], torch.zeros_like(out[without]))
    assert (out[~without] != 0).any(dim=1).all()
    if tokens >= WITHOUT_ERROR_LIMITS:
        exact, _ = reference(wrapper, x, ids, weights)
        assert relative_error(out.double().numpy(), exact) <= limit_of(wrapper.method).decoded
    wrapper.gpu_experts_mask.fill_(False)


@pytest.mark.parametrize("method", METHODS)
def test_numbers_against_the_weights_that_were_given(method):
    shape = Shape(experts=6, top_k=3, hidden=256, intermediate=320)
    x, ids, weights = batch(shape, 33)
    experts = list(zip(*(part.float().numpy() for part in tensors(shape)), strict=True))
    exact = moe(experts, x.double().numpy(), ids.numpy(), weights.numpy())
    out = loaded(shape, method).forward(x, ids, weights).double().numpy()
    assert relative_error(out, exact) <= limit_of(method).original


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("activation", [Activation(0.5), Activation(0.7, 1.7)])
def test_activations(method, activation):
    wrapper = loaded(SHAPE, method, swiglu_limit=activation.limit, swiglu_alpha=activation.alpha)
    tokens = batch(SHAPE, 9)
    out = wrapper.forward(*tokens)
    assert_right(wrapper, out, *tokens, activation=activation)
    _, bound = reference(wrapper, *tokens)
    plain = reference(wrapper, *tokens)[0]
    assert (np.abs(out.double().numpy() - plain) > bound).any()  # it is not the plain one


class TestIds:
    def test_ids_that_are_no_experts_are_skipped(self, wrapper):
        x, ids, weights = batch(SHAPE, 9)
        for tokens in (1, 9):
            odd = ids[:tokens].clone()
            odd[:, 1] = torch.tensor([-1, SHAPE.experts, SHAPE.experts + 1, -7, 1 << 20, -(1 << 40)] * 2)[:tokens]
            odd[0] = torch.tensor([-1, SHAPE.experts, -1])
            out = wrapper.forward(x[:tokens], odd, weights[:tokens])
            assert_right(wrapper, out, x[:tokens], odd, weights[:tokens])
            assert (out[0] == 0).all()

    def test_no_expert_at_all(self, wrapper):
        x, ids, weights = batch(SHAPE, 10)
        out = wrapper.forward(x, torch.full_like(ids, -1), weights)
        assert same_bits(out, torch.zeros_like(x))

    def test_int32_gives_the_bits_of_int64(self, wrapper):
        x, ids, weights = batch(SHAPE, 10)
        ids[3, 1], ids[4, 2] = -1, SHAPE.experts
        assert same_bits(wrapper.forward(x, ids.int(), weights), wrapper.forward(x, ids, weights))

    @pytest.mark.parametrize("tokens", [1, 2, 10])
    def test_duplicates_count_every_time(self, wrapper, tokens):
        x, ids, weights = batch(SHAPE, tokens)
        ids[:, 2] = ids[:, 0]
        assert_right(wrapper, wrapper.forward(x, ids, weights), x, ids, weights)
        ids[:] = 2
        assert_right(wrapper, wrapper.forward(x, ids, weights), x, ids, weights)

    def test_weights_are_applied_as_they_are(self, wrapper):
        """Twice as large, twice the result: exactly, as it is a power of two. And a 0 is a 0."""
        x, ids, weights = batch(SHAPE, 9)
        out = wrapper.forward(x, ids, weights)
        assert same_bits(wrapper.forward(x, ids, 2 * weights), 2 * out)
        assert (wrapper.forward(x, ids, 0 * weights) == 0).all()


class TestLimits:
    def test_too_many_tokens_are_refused_and_the_wrapper_goes_on(self, wrapper):
        tokens = batch(SHAPE, 9)
        expected = wrapper.forward(*tokens)
        with pytest.raises(ValueError, match=rf"{CHUNK + 1} tokens .* takes 1 to {CHUNK} \(chunked_prefill_size\)"):
            wrapper.forward(*batch(SHAPE, CHUNK + 1))
        assert same_bits(wrapper.forward(*tokens), expected)

    @pytest.mark.parametrize("chunk", [-1, 0, None])
    def test_no_limit(self, chunk):
        shape = Shape(experts=3, top_k=2, hidden=20, intermediate=64)
        wrapper = loaded(shape, "AMXINT8", chunked_prefill_size=chunk)
        assert wrapper.chunked_prefill_size == chunk
        tokens = batch(shape, 5000)  # more than one pass of the kernels
        out = wrapper.forward(*tokens)
        assert_right(wrapper, out, *tokens)

    @pytest.mark.parametrize("chunk", [1, 7, 33])
    def test_any_limit(self, chunk):
        wrapper = loaded(SHAPE, "AMXINT4", chunked_prefill_size=chunk)
        tokens = batch(SHAPE, chunk)
        assert_right(wrapper, wrapper.forward(*tokens), *tokens)
        with pytest.raises(ValueError, match="chunked_prefill_size"):
            wrapper.forward(*batch(SHAPE, chunk + 1))


def test_results_do_not_depend_on_the_threads():
    tokens = batch(SHAPE, 10)
    assert same_bits(
        loaded(SHAPE, "INT4G", cpuinfer_threads=1).forward(*tokens),
        loaded(SHAPE, "INT4G", cpuinfer_threads=2).forward(*tokens),
    )


def test_methods_that_are_one_format_under_two_names_agree():
    tokens = batch(SHAPE, 10)
    for one, two in (("AMXINT8", "MOE_INT8"), ("AMXINT4", "MOE_INT4")):
        assert same_bits(loaded(SHAPE, one).forward(*tokens), loaded(SHAPE, two).forward(*tokens))


def test_weights_can_be_loaded_again():
    wrapper, tokens = make(), batch()
    for seed in (0, 1):
        wrapper.load_weights_from_tensors(*tensors(SHAPE, seed))
        assert same_bits(wrapper.forward(*tokens), loaded(seed=seed).forward(*tokens))


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_load_that_fails_leaves_no_mixture(error, monkeypatch):
    """Of the experts before it and some of its own."""
    wrapper, tokens = loaded(), batch()
    expected = wrapper.forward(*tokens)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("kt_kernel.weights.load_layer_from_tensors", fail)
        with pytest.raises(error):
            wrapper.load_weights_from_tensors(*tensors(seed=1))
    with pytest.raises(RuntimeError, match="layer 0 has no weights"):
        wrapper.forward(*tokens)
    wrapper.load_weights_from_tensors(*tensors())
    assert same_bits(wrapper.forward(*tokens), expected)
