"""The tensors of a call: types, shapes, layouts, and the ones that are refused."""

import numpy as np
import pytest
from wrapper_cases import SHAPE, batch, loaded, same_bits, tensors, torch

from kt_kernel import KTMoEWrapper


@pytest.fixture(scope="module", params=["BF16", "AMXINT4"])
def wrapper(request):
    return loaded(SHAPE, request.param)


class TestHiddenStates:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
    def test_other_floats_are_rounded_and_come_back(self, wrapper, dtype):
        x, ids, weights = batch(SHAPE, 9)
        expected = wrapper.forward(x, ids, weights)
        out = wrapper.forward(x.to(dtype), ids, weights)
        assert same_bits(out, expected.to(dtype))

    def test_rounding_is_to_nearest(self, wrapper):
        x, ids, weights = batch(SHAPE, 9)
        exact = x.float() * (1 + 2.0**-10)  # a quarter of a step of bf16: back to the same value
        assert same_bits(wrapper.forward(exact, ids, weights).bfloat16(), wrapper.forward(x, ids, weights))

    @pytest.mark.parametrize("leading", [(2, 5), (1, 10), (5, 1, 2), (10, 1)])
    def test_leading_dimensions_become_tokens(self, wrapper, leading):
        x, ids, weights = batch(SHAPE, 10)
        out = wrapper.forward(x.reshape(*leading, SHAPE.hidden), ids, weights)
        assert same_bits(out, wrapper.forward(x, ids, weights))

    def test_one_token_without_a_dimension(self, wrapper):
        x, ids, weights = batch(SHAPE, 1)
        assert same_bits(wrapper.forward(x[0], ids, weights), wrapper.forward(x, ids, weights))

    @pytest.mark.parametrize("shape", [(0, SHAPE.hidden), (0, 3, SHAPE.hidden), (3, 0, SHAPE.hidden)])
    def test_no_tokens(self, wrapper, shape):
        x, ids, weights = torch.empty(shape), torch.empty((0, 3), dtype=torch.int32), torch.empty((0, 3))
        out = wrapper.forward(x, ids, weights)
        assert (tuple(out.shape), out.dtype) == ((0, SHAPE.hidden), torch.float32)
        wrapper.submit_forward(x, ids, weights)
        assert wrapper.sync_forward(x).numel() == 0
        assert wrapper.forward(*batch(SHAPE, 2)).shape == (2, SHAPE.hidden)


class TestLayouts:
    """Views of larger or turned tensors give what their copies give."""

    def test_rows_of_a_larger_tensor(self, wrapper):
        x, ids, weights = batch(SHAPE, 10)
        expected = wrapper.forward(x[::2].contiguous(), ids[::2].contiguous(), weights[::2].contiguous())
        assert same_bits(wrapper.forward(x[::2], ids[::2], weights[::2]), expected)

    def test_transposed_and_sliced(self, wrapper):
        x, ids, weights = batch(SHAPE, 9)
        turned = [part.T.contiguous().T for part in (x, ids, weights)]
        assert not any(part.is_contiguous() for part in turned)
        assert same_bits(wrapper.forward(*turned), wrapper.forward(x, ids, weights))
        wide = [torch.cat([part, part], dim=1)[:, : part.shape[1]] for part in (x, ids, weights)]
        assert same_bits(wrapper.forward(*wide), wrapper.forward(x, ids, weights))

    def test_expanded(self, wrapper):
        x, ids, weights = batch(SHAPE, 1)
        out = wrapper.forward(x.expand(5, -1), ids.expand(5, -1), weights.expand(5, -1))
        assert same_bits(out, wrapper.forward(*(part.repeat(5, 1) for part in (x, ids, weights))))

    def test_tensors_that_need_gradients(self, wrapper):
        x, ids, weights = batch(SHAPE, 3)
        out = wrapper.forward(x.float().requires_grad_(), ids, weights.requires_grad_())
        assert not out.requires_grad
        assert same_bits(out.bfloat16(), wrapper.forward(x, ids, weights.detach()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_floats(wrapper, dtype):
    x, ids, weights = batch(SHAPE, 9)
    out = wrapper.forward(x, ids, weights.to(dtype))
    assert same_bits(out, wrapper.forward(x, ids, weights.to(dtype).float()))


def test_inputs_are_not_changed(wrapper):
    tokens = batch(SHAPE, 9)
    copies = [part.clone() for part in tokens]
    wrapper.forward(*tokens)
    assert all(map(torch.equal, tokens, copies))


REFUSED = [
    ("hidden_states", lambda x: x.numpy(force=True) if x.dtype != torch.bfloat16 else x.float().numpy(), TypeError),
    ("hidden_states", lambda x: x.int(), TypeError),
    ("hidden_states", lambda x: x[:, :-1], ValueError),
    ("hidden_states", lambda x: x[:-1], ValueError),
    ("hidden_states", lambda x: x.new_empty(()), ValueError),
    ("hidden_states", lambda x: x.to("meta"), ValueError),
    ("topk_ids", lambda ids: ids.tolist(), TypeError),
    ("topk_ids", lambda ids: ids.float(), TypeError),
    ("topk_ids", lambda ids: ids.to(torch.int16), TypeError),
    ("topk_ids", lambda ids: ids.bool(), TypeError),
    ("topk_ids", lambda ids: ids[:, :-1], ValueError),
    ("topk_ids", lambda ids: ids[:-1], ValueError),
    ("topk_ids", lambda ids: ids.reshape(-1), ValueError),
    ("topk_ids", lambda ids: ids.to("meta"), ValueError),
    ("topk_weights", lambda w: w.tolist(), TypeError),
    ("topk_weights", lambda w: w.int(), TypeError),
    ("topk_weights", lambda w: w[:, :-1], ValueError),
    ("topk_weights", lambda w: w[None], ValueError),
    ("topk_weights", lambda w: w.to("meta"), ValueError),
]


@pytest.mark.parametrize(("name", "change", "kind"), REFUSED)
def test_tensors_that_are_refused(wrapper, name, change, kind):
    tokens = dict(zip(("hidden_states", "topk_ids", "topk_weights"), batch(SHAPE, 3), strict=True))
    expected = wrapper.forward(**tokens)
    words = name if name != "hidden_states" else "hidden_states|tokens"
    with pytest.raises(kind, match=words):
        wrapper.forward(**{**tokens, name: change(tokens[name])})
    assert same_bits(wrapper.forward(**tokens), expected)


class TestStreams:
    @pytest.mark.parametrize("stream", [None, 0])
    def test_none_is_needed(self, wrapper, stream):
        tokens = batch(SHAPE, 3)
        assert same_bits(wrapper.forward(*tokens, stream), wrapper.forward(*tokens))
        assert same_bits(wrapper.forward(*tokens, cuda_stream=stream), wrapper.forward(*tokens))

    @pytest.mark.parametrize(
        ("stream", "kind"), [(1234, ValueError), ("0", TypeError), (-1, TypeError), (1.0, TypeError)]
    )
    def test_others_are_refused(self, wrapper, stream, kind):
        tokens = batch(SHAPE, 3)
        with pytest.raises(kind, match="cuda_stream"):
            wrapper.forward(*tokens, stream)
        wrapper.submit_forward(*tokens)
        with pytest.raises(kind, match="cuda_stream"):
            wrapper.sync_forward(tokens[0], stream)
        assert same_bits(wrapper.sync_forward(tokens[0]), wrapper.forward(*tokens))


def test_nan_stays_in_its_token(wrapper):
    x, ids, weights = batch(SHAPE, 9)
    expected = wrapper.forward(x, ids, weights)
    x[4, 7] = float("nan")
    out = wrapper.forward(x, ids, weights)
    others = [token for token in range(9) if token != 4]
    assert out[4].isnan().all()
    assert same_bits(out[others], expected[others])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_experts_of_other_floats(dtype):
    given = [part.to(dtype) for part in tensors(SHAPE)]
    wrapper = KTMoEWrapper(0, SHAPE.experts, SHAPE.top_k, SHAPE.hidden, SHAPE.intermediate, method="BF16")
    wrapper.load_weights_from_tensors(*given)
    rounded = [part.bfloat16().float().numpy() for part in given]
    for expert in range(SHAPE.experts):
        decoded = wrapper.moe.decode_expert(expert)
        assert all(np.array_equal(a, b[expert]) for a, b in zip(decoded, rounded, strict=True))
