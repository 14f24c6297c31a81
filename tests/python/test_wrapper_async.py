"""submit_forward and sync_forward: what may happen between and around them."""

import threading
import time

import pytest
from layer_reference import Shape
from wrapper_cases import SHAPE, batch, loaded, make, same_bits, tensors, torch

LARGE = Shape(experts=4, top_k=2, hidden=512, intermediate=1024)


@pytest.fixture(scope="module")
def large():
    return loaded(LARGE, "BF16", chunked_prefill_size=-1)


def slow_batch(wrapper, seconds: float) -> "list[torch.Tensor]":
    """Tokens whose forward takes at least so long on this machine."""
    tokens = 64
    while True:
        given = batch(LARGE, tokens)
        begin = time.perf_counter()
        wrapper.forward(*given)
        if time.perf_counter() - begin > seconds:
            return given
        tokens *= 2


def test_submit_returns_before_the_work_is_done(large):
    tokens = slow_batch(large, 0.04)
    shares = []
    for _ in range(5):  # somebody else may use the cores in one of them
        begin = time.perf_counter()
        large.submit_forward(*tokens)
        submitted = time.perf_counter()
        large.sync_forward(tokens[0])
        shares.append((submitted - begin) / (time.perf_counter() - begin))
    assert min(shares) < 1 / 3


def test_inputs_may_be_overwritten_after_submit(large):
    x, ids, weights = slow_batch(large, 0.02)
    expected = large.forward(x, ids, weights)
    for as_ids in (torch.int64, torch.int32):
        given = [x.clone(), ids.to(as_ids, copy=True), weights.clone()]
        large.submit_forward(*given)
        given[1][given[1] >= 1] = -1  # what engines do with ids of the other device
        given[0].zero_()
        given[2].fill_(float("nan"))
        assert same_bits(large.sync_forward(given[0]), expected)


def test_converted_inputs_need_not_live_on(large):
    x, ids, weights = batch(LARGE, 33)
    expected = large.forward(x, ids, weights)
    large.submit_forward(x.double(), ids.T.contiguous().T, weights.double())
    torch.full((33, LARGE.hidden), float("nan"), dtype=torch.bfloat16)  # gets the memory of the conversion, if freed
    assert same_bits(large.sync_forward(x), expected)


def test_several_wrappers_before_any_sync():
    """In any order, with batches of different sizes."""
    wrappers = [loaded(SHAPE, seed=layer, layer_idx=layer) for layer in range(5)]
    batches = [batch(SHAPE, tokens, seed=tokens) for tokens in (1, 40, 3, 17, 9)]
    expected = [wrapper.forward(*tokens) for wrapper, tokens in zip(wrappers, batches, strict=True)]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        for wrapper, tokens in zip(wrappers, batches, strict=True):
            wrapper.submit_forward(*tokens)
        for layer in order:
            assert same_bits(wrappers[layer].sync_forward(batches[layer][0]), expected[layer])


def test_results_belong_to_the_caller():
    wrapper, one, two = loaded(), batch(SHAPE, 9), batch(SHAPE, 9, seed=1)
    first = wrapper.forward(*one)
    kept = first.clone()
    second = wrapper.forward(*two)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert same_bits(first, kept)
    second.zero_()
    assert same_bits(wrapper.forward(*one), kept)


def test_a_result_is_no_view_of_the_input():
    wrapper, tokens = loaded(), batch(SHAPE, 9)
    out = wrapper.forward(*tokens)
    assert out.data_ptr() not in {part.data_ptr() for part in tokens}


class TestOrder:
    def test_a_second_submit_gives_up_the_first(self, large):
        slow, quick = slow_batch(large, 0.02), batch(LARGE, 5, seed=3)
        expected = large.forward(*quick)
        for _ in range(3):
            large.submit_forward(*slow)
        large.submit_forward(*quick)
        assert same_bits(large.sync_forward(quick[0]), expected)
        with pytest.raises(ValueError, match="nothing was submitted"):
            large.sync_forward(quick[0])

    def test_a_call_of_no_tokens_leaves_the_one_before_alone(self):
        wrapper, tokens = loaded(), batch(SHAPE, 3)
        expected = wrapper.forward(*tokens)
        nothing = [part[:0] for part in tokens]
        wrapper.submit_forward(*tokens)
        wrapper.submit_forward(*nothing)
        assert wrapper.sync_forward(nothing[0]).shape == (0, SHAPE.hidden)
        assert same_bits(wrapper.sync_forward(tokens[0]), expected)

    def test_sync_without_submit(self):
        wrapper, tokens = loaded(), batch(SHAPE, 3)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"nothing was submitted; call submit_forward before sync_forward"):
                wrapper.sync_forward(tokens[0])
        with pytest.raises(ValueError, match="nothing was submitted"):
            wrapper.sync_forward(tokens[0][:0])
        assert wrapper.forward(*tokens).shape == (3, SHAPE.hidden)

    def test_sync_with_another_number_of_tokens(self):
        wrapper, tokens = loaded(), batch(SHAPE, 3)
        expected = wrapper.forward(*tokens)
        wrapper.submit_forward(*tokens)
        for other in (batch(SHAPE, 4)[0], tokens[0][:0]):
            with pytest.raises(ValueError, match=f"3 tokens were submitted; .* with {len(other)}"):
                wrapper.sync_forward(other)
        assert same_bits(wrapper.sync_forward(tokens[0]), expected)

    def test_weights_do_not_change_under_a_call(self):
        wrapper, tokens = loaded(), batch(SHAPE, 3)
        wrapper.submit_forward(*tokens)
        with pytest.raises(RuntimeError, match="call sync_forward first"):
            wrapper.load_weights_from_tensors(*tensors(seed=1))
        assert same_bits(wrapper.sync_forward(tokens[0]), loaded().forward(*tokens))
        wrapper.load_weights_from_tensors(*tensors(seed=1))

    def test_the_result_has_the_type_that_sync_is_given(self):
        wrapper, tokens = loaded(), batch(SHAPE, 3)
        wrapper.submit_forward(*tokens)
        assert wrapper.sync_forward(tokens[0].float()).dtype == torch.float32


def test_threads_with_wrappers_of_their_own():
    wrappers = [loaded(SHAPE, seed=layer, layer_idx=layer) for layer in range(4)]
    batches = [batch(SHAPE, 3 + layer, seed=layer) for layer in range(4)]
    expected = [wrapper.forward(*tokens) for wrapper, tokens in zip(wrappers, batches, strict=True)]
    wrong: list[int] = []

    def work(layer: int) -> None:
        for _ in range(50):
            if not same_bits(wrappers[layer].forward(*batches[layer]), expected[layer]):
                wrong.append(layer)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_python_goes_on_in_other_threads_while_one_waits(large):
    tokens = slow_batch(large, 0.04)
    counted = 0
    done = threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    for _ in range(3):
        large.forward(*tokens)
    done.set()
    thread.join()
    assert counted > 10


def test_a_wrapper_may_go_while_its_call_runs(large):
    tokens = slow_batch(large, 0.02)
    wrapper = make(LARGE, "BF16", chunked_prefill_size=-1)
    wrapper.load_weights_from_tensors(*tensors(LARGE))
    expected = large.forward(*tokens)
    wrapper.submit_forward(*tokens)
    del wrapper
    assert same_bits(large.forward(*tokens), expected)
