"""What one forward promises beside the numbers: who is affected by what, and what never changes a bit."""

import threading
from itertools import cycle, pairwise

import numpy as np
import pytest
from layer_limits import FORMATS, LIMITS, RUNNABLE, act_kind
from layer_reference import (
    Case,
    Shape,
    from_bf16,
    moe,
    random_batch,
    relative_error,
    to_bf16,
)

import kt_kernel
from kt_kernel import _core

VARIANT = kt_kernel.__cpu_variant__
SHAPE = Shape(experts=5, top_k=3, hidden=144, intermediate=200)
EVERY_KERNEL = [(variant, name) for variant in RUNNABLE for name in FORMATS]


@pytest.mark.parametrize("threads", [(2,), (1, 1)])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_token_without_experts_gives_exact_zeros(weight_format, threads):
    case = Case(SHAPE, weight_format, threads)
    case.mask()[2] = 1
    x, ids, weights = random_batch(SHAPE, 7)
    ids[:] = np.where(ids == 2, 1, ids)
    ids[3] = [2, -1, SHAPE.experts]
    out = case.run(x, ids, weights)
    assert (out[3] == 0).all()
    assert (np.delete(out, 3, axis=0) != 0).any(axis=1).all()
    ids[:] = -1
    assert (case.run(x, ids, weights) == 0).all()


@pytest.mark.parametrize("threads", [(2,), (1, 2)])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_incremental_adds_to_what_is_there(weight_format, threads):
    case = Case(SHAPE, weight_format, threads)
    x, ids, weights = random_batch(SHAPE, 9)
    old = to_bf16(np.random.default_rng(3).standard_normal((9, SHAPE.hidden)))
    ids[4] = -1
    alone, low = (from_bf16(part).astype(np.float64) for part in case.sums(x, ids, weights))
    added = from_bf16(case.run(x, ids, weights, onto=old))
    exact = alone + low + from_bf16(old)  # 16 bits of the sum: rounding once differs only at ties
    assert (np.abs(added - exact) <= 2.0**-8 * np.abs(exact) + 1e-6).all()
    assert np.array_equal(added[4], from_bf16(old)[4])


@pytest.mark.parametrize("threads", [(2,), (1, 2)])
def test_an_addend_elsewhere_gives_the_same_bits_and_stays(threads):
    shape = Shape(experts=3, top_k=2, hidden=20, intermediate=130)
    case = Case(shape, threads=threads, max_tokens=5000)
    for tokens in (1, 9, 4100):  # the last in two passes
        batch = random_batch(shape, tokens)
        old = to_bf16(np.random.default_rng(3).standard_normal((tokens, shape.hidden)))
        addend = old.copy()
        assert np.array_equal(case.run(*batch, addend=addend), case.run(*batch, onto=old))
        assert np.array_equal(addend, old)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("variant", "weight_format"), EVERY_KERNEL)
def test_nan_and_inf_stay_in_their_token(variant, weight_format, value):
    case = Case(SHAPE, weight_format, threads=(2,), variant=variant)
    for tokens in (6, 40):  # register tiles, and blocks or hardware tiles
        x, ids, weights = random_batch(SHAPE, tokens)
        ids[: tokens // 2] = [0, 1, 1]
        clean = case.run(x, ids, weights)
        x[2, 5] = to_bf16(np.array([value]))[0]
        out = case.run(x, ids, weights)
        assert np.array_equal(np.delete(out, 2, axis=0), np.delete(clean, 2, axis=0))
        assert not np.isfinite(from_bf16(out[2])).any()


@pytest.mark.parametrize(("variant", "weight_format"), EVERY_KERNEL)
def test_the_number_of_threads_does_not_change_a_bit(variant, weight_format):
    """Nor does a second call. 2 threads get one panel of the down projection at a time where 1 gets two."""
    shape = Shape(experts=2, top_k=1, hidden=256, intermediate=96)
    cases = [Case(shape, weight_format, (threads,), variant=variant) for threads in (1, 2, 3)]
    for tokens in (1, 2, 3, 5, 7, 40):
        x, _, weights = random_batch(shape, tokens)
        ids = np.arange(tokens)[:, None] // 7 % 2
        first = cases[0].sums(x, ids, weights)
        for case in cases:
            assert all(map(np.array_equal, case.sums(x, ids, weights), first))


@pytest.mark.parametrize("weight_format", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_regions_of_columns_give_the_same_bits_in_every_run(weight_format, nodes):
    """Regions are wider with fewer threads. Workers wait for each other's products and for room; there are more of
    them than cores, so that they do."""
    shape = Shape(experts=5, top_k=3, hidden=530, intermediate=320)  # 17 pairs of panels, the last one not whole
    x, ids, weights = random_batch(shape, 100)
    cases = [Case(shape, weight_format, (threads,) * nodes, max_tokens=100) for threads in (1, 2, 4)]
    first = cases[0].run(x, ids, weights)
    expected = moe(cases[0].decoded(), from_bf16(x), ids, weights)
    assert relative_error(from_bf16(first), expected) < 0.03
    for case in cases * 10:
        assert np.array_equal(case.run(x, ids, weights), first)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_nodes_change_rounding_only(weight_format):
    batch = random_batch(SHAPE, 20)
    outs = []
    for threads in [(1,), (1, 2), (1, 1, 1)]:
        case = Case(SHAPE, weight_format, threads)
        outs.append(from_bf16(case.run(*batch)))
        expected = moe(case.decoded(), from_bf16(batch[0]), *batch[1:])
        assert relative_error(outs[-1], expected) <= LIMITS[weight_format, act_kind(weight_format, VARIANT)].decoded
    if weight_format == "bf16":  # quantised down projections have a scale per row and node
        assert max(relative_error(out, outs[0]) for out in outs) < 0.003


@pytest.mark.parametrize("threads", [(2,), (1, 1)])
@pytest.mark.parametrize("weight_format", ["bf16", "int4g"])
def test_a_long_call_equals_its_pieces(weight_format, threads):
    """4096 tokens are one pass."""
    shape = Shape(experts=3, top_k=2, hidden=20, intermediate=70)
    case = Case(shape, weight_format, threads, max_tokens=9000)
    x, ids, weights = random_batch(shape, 4096 * 2 + 37)
    cuts = [0, 4096, 8192, len(x)]
    pieces = [case.run(x[a:b], ids[a:b], weights[a:b]) for a, b in pairwise(cuts)]
    assert np.array_equal(case.run(x, ids, weights), np.concatenate(pieces))


@pytest.mark.parametrize("threads", [(2,), (1, 1)])
def test_ids_of_32_bits_give_what_64_bits_give(threads):
    shape = Shape(experts=3, top_k=2, hidden=20, intermediate=130)
    case = Case(shape, threads=threads, max_tokens=5000)
    for tokens in (1, 9, 4100):  # the last in two passes
        x, ids, weights = random_batch(shape, tokens)
        ids[tokens // 2 :, 0] = np.resize([-1, 3, -(2**31), 2**31 - 1], tokens - tokens // 2)
        assert np.array_equal(case.run(x, ids.astype(np.int32), weights), case.run(x, ids, weights))


def test_duplicates_in_one_token_count_twice():
    case = Case(SHAPE)
    for tokens in (1, 5):
        x, ids, weights = random_batch(SHAPE, tokens)
        ids[:] = 4
        expected = moe(case.decoded(), from_bf16(x), ids, weights)
        assert relative_error(from_bf16(case.run(x, ids, weights)), expected) < 0.004


def test_the_mask_is_read_at_every_call():
    case = Case(SHAPE)
    x, ids, weights = random_batch(SHAPE, 8)
    everything = case.run(x, ids, weights)
    for expert in range(SHAPE.experts):
        case.mask()[expert] = 255
        kept = np.where(ids == expert, -1, ids)
        masked = case.run(x, ids, weights)
        case.mask()[expert] = 0
        assert np.array_equal(masked, case.run(x, kept, weights))
    assert np.array_equal(case.run(x, ids, weights), everything)


def test_experts_skipped_in_one_call_join_those_of_the_mask():
    case = Case(SHAPE)
    case.mask()[1] = 1
    x, ids, weights = random_batch(SHAPE, 8)
    before = case.run(x, ids, weights)
    skip = np.array([0, 0, 7, 0, 255], np.uint8)
    kept = np.where(np.isin(ids, [2, 4]), -1, ids)
    assert np.array_equal(case.run(x, ids, weights, skip=skip), case.run(x, kept, weights))
    assert np.array_equal(case.run(x, ids, weights), before)


def test_a_mask_that_changes_during_a_call_counts_for_all_of_it_or_not_at_all():
    case = Case(Shape(experts=1, top_k=1, hidden=16, intermediate=16), max_tokens=5000)
    x, ids, weights = random_batch(case.shape, 5000)  # two passes
    everything = case.run(x, ids, weights)
    mask, stop = case.mask(), threading.Event()

    def flicker():
        while not stop.is_set():
            mask[0] ^= 1

    thread = threading.Thread(target=flicker)
    thread.start()
    try:
        outs = [case.run(x, ids, weights) for _ in range(800)]
    finally:
        stop.set()
        thread.join()
    assert all(np.array_equal(out, everything) or not out.any() for out in outs)


def several_cases(pool: "_core.Pool") -> list[tuple[Case, tuple, np.ndarray]]:
    """Layers of different shapes and formats on one pool, each with a batch and its result when alone."""
    shapes = [SHAPE, Shape(2, 1, 16, 300), Shape(9, 4, 333, 64), Shape(3, 2, 64, 64)]
    found = []
    for seed, (shape, weight_format) in enumerate(zip(cycle(shapes), FORMATS, strict=False)):
        batch = random_batch(shape, 10 + 15 * (seed % 4))
        alone = Case(shape, weight_format, seed=seed, pool=_core.Pool([2], spin_us=0)).run(*batch)
        found.append((Case(shape, weight_format, seed=seed, pool=pool), batch, alone))
    return found


def test_layers_of_one_pool_take_turns():
    cases = several_cases(_core.Pool([2]))
    for case, batch, alone in cases + cases[::-1]:
        assert np.array_equal(case.run(*batch), alone)


def test_calls_from_several_python_threads():
    cases = several_cases(_core.Pool([2]))
    wrong = []

    def work(start: int) -> None:
        for i in range(start, start + 24):
            case, batch, alone = cases[i % len(cases)]
            if not np.array_equal(case.run(*batch), alone):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_expert_can_be_loaded_again():
    case, other = Case(SHAPE, "int8"), Case(SHAPE, "int8", seed=1)
    for expert, weights in enumerate(other.original):
        case.layer.load_expert(expert, *weights)
    batch = random_batch(SHAPE, 5)
    assert np.array_equal(case.run(*batch), other.run(*batch))
