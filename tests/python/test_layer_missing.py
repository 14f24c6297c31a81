"""Experts without weights: an error that names them before anything is computed, unless nobody asks for them."""

import numpy as np
import pytest
from layer_limits import FORMATS
from layer_reference import Case, Shape, random_batch

SHAPE = Shape(experts=5, top_k=3, hidden=80, intermediate=130)
MISSING = 3


def partial(threads=(2,), max_tokens=64) -> Case:
    """The layer of Case(SHAPE) with one expert not loaded."""
    rest = [expert for expert in range(SHAPE.experts) if expert != MISSING]
    return Case(SHAPE, threads=threads, max_tokens=max_tokens, load=rest)


@pytest.mark.parametrize("threads", [(2,), (1, 1)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_expert_without_weights_is_named_and_nothing_is_written(threads, dtype):
    complete, case = Case(SHAPE, threads=threads), partial(threads)
    x, ids, weights = random_batch(SHAPE, 9)
    ids = np.where(ids == MISSING, 1, ids).astype(dtype)
    good = case.run(x, ids, weights)
    assert np.array_equal(good, complete.run(x, ids, weights))
    ids[8, 2] = MISSING
    old = np.full(x.shape, 0x4242, np.uint16)
    out = old.copy()
    with pytest.raises(ValueError, match=r"^expert 3 of this layer has no weights; load them, or mask the expert"):
        case.layer.forward(9, *(a.ctypes.data for a in (ids, weights, x, out)), id_bytes=ids.itemsize)
    assert np.array_equal(out, old)
    ids[8, 2] = 0
    assert np.array_equal(case.run(x, ids, weights), complete.run(x, ids, weights))


def test_the_last_pass_is_looked_at_before_the_first_is_computed():
    case = partial(max_tokens=5000)
    x, ids, weights = random_batch(SHAPE, 5000)
    ids[:] = 0
    ids[-1, -1] = MISSING
    out = np.zeros(x.shape, np.uint16)
    with pytest.raises(ValueError, match="expert 3 of this layer has no weights"):
        case.layer.forward(5000, *(a.ctypes.data for a in (ids, weights, x, out)))
    assert not out.any()


def test_a_masked_or_skipped_expert_needs_no_weights():
    complete, case = Case(SHAPE), partial()
    batch = random_batch(SHAPE, 9)
    skip = np.zeros(SHAPE.experts, np.uint8)
    skip[MISSING] = 1
    expected = complete.run(*batch, skip=skip)
    assert np.array_equal(case.run(*batch, skip=skip), expected)
    case.mask()[MISSING] = 1
    assert np.array_equal(case.run(*batch), expected)
    case.mask()[MISSING] = 0
    with pytest.raises(ValueError, match="expert 3"):
        case.run(*batch)


def test_the_count_of_loaded_experts():
    case = partial()
    assert case.layer.loaded_experts == 4
    case.load(0, case.original[0])
    assert case.layer.loaded_experts == 4
    with pytest.raises(ValueError, match="gate has shape"):
        case.load(MISSING, case.original[0][::-1])
    assert case.layer.loaded_experts == 4
    case.load(MISSING, case.original[MISSING])
    assert case.layer.loaded_experts == 5
    assert np.array_equal(case.run(*random_batch(SHAPE, 4)), Case(SHAPE).run(*random_batch(SHAPE, 4)))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_random_weights_are_weights_of_every_expert(weight_format):
    case = Case(SHAPE, weight_format, load=[])
    assert case.layer.loaded_experts == 0
    with pytest.raises(ValueError, match="has no weights"):
        case.run(*random_batch(SHAPE, 4))
    case.layer.fill_random(1)
    assert case.layer.loaded_experts == 5
    assert case.run(*random_batch(SHAPE, 4)).any()
