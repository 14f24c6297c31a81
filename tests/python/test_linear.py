"""Linears of the core: what a caller in Python meets. The numbers are tested in tests/cpp/linear_test.cc."""

import os
import threading

import numpy as np
import pytest
from layer_limits import RUNNABLE
from layer_reference import Case, Shape, from_bf16, random_batch, shared_pool, to_bf16

from kt_kernel import _core

FORMATS = ("bf16", "int8", "int4", "int4g")


def make(weight_format="bf16", rows=40, columns=70, bias=False, variant=None, threads=(2,), seed=0):
    rng = np.random.default_rng(seed)
    linear = _core.Linear(
        shared_pool(threads), format=weight_format, rows=rows, columns=columns, bias=bias, variant=variant
    )
    weights = to_bf16(rng.standard_normal((rows, columns), np.float32) / columns**0.5)
    linear.load(weights)
    if bias:
        linear.load_bias(rng.standard_normal(rows, np.float32))
    return linear, weights


def run(linear, x: np.ndarray) -> np.ndarray:
    out = np.full((len(x), linear.rows), np.nan, np.float32)
    linear.forward(len(x), x.ctypes.data, x.strides[0] // 2, out.ctypes.data, linear.rows, True)
    return out


def random_rows(count: int, columns: int, seed=1) -> np.ndarray:
    return to_bf16(np.random.default_rng(seed).standard_normal((count, columns), np.float32))


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_product_is_that_of_the_decoded_weights(weight_format, variant):
    linear, weights = make(weight_format, variant=variant)
    x = random_rows(5, 70)
    decoded = linear.decode()
    exact = from_bf16(x).astype(np.float64) @ decoded.T.astype(np.float64)
    assert np.abs(run(linear, x) - exact).max() < (1e-5 if weight_format == "bf16" else 0.05)
    if weight_format == "bf16":
        assert np.array_equal(decoded, from_bf16(weights))


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_tokens_of_a_layer_get_the_bits_that_they_would_get_alone(weight_format, variant):
    shape = Shape(experts=3, top_k=2, hidden=150, intermediate=90)
    case = Case(shape, weight_format, (2,), variant=variant)
    x, ids, weights = random_batch(shape, 32)
    together = case.run(x, ids, weights)
    alone = [case.run(x[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(32)]
    assert np.array_equal(together, np.concatenate(alone))


def test_sizes_and_bytes_are_told():
    linear, _ = make("int8", rows=33, columns=100, bias=True)
    assert (linear.rows, linear.columns, linear.bias, linear.format) == (33, 100, True, "int8")
    assert linear.packed_bytes == 3 * 16 * (128 + 4)


def test_wrong_weights_are_refused():
    linear, weights = make()
    with pytest.raises(ValueError, match=r"\[40, 70\]"):
        linear.load(weights[:, :-1].copy())
    with pytest.raises(TypeError, match="bf16"):
        linear.load(weights.astype(np.float32))
    with pytest.raises(ValueError, match="bias=True"):
        linear.load_bias(np.zeros(40, np.float32))


def test_unknown_formats_are_refused():
    pool = shared_pool((1,))
    with pytest.raises(ValueError, match="int8"):
        _core.Linear(pool, format="int3", rows=1, columns=1)
    with pytest.raises(ValueError, match="fp8"):
        _core.Linear(pool, format="fp8", rows=1, columns=1)


def test_several_threads_may_call_at_once():
    linear, _ = make("int8", rows=200, columns=300)
    x = random_rows(4, 300)
    expected = run(linear, x)
    results = []
    threads = [
        threading.Thread(target=lambda: results.extend(np.array_equal(run(linear, x), expected) for _ in range(50)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 150


def test_a_forked_child_gets_an_error_at_once():
    linear, _ = make()
    x = random_rows(1, 70)
    child = os.fork()
    if child == 0:
        try:
            run(linear, x)
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    run(linear, x)
