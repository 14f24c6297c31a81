"""Sub-pools: each holds a part of every expert, on one NUMA node too, and changes results by rounding only."""

import pytest
from layer_reference import Shape, relative_error
from wrapper_cases import METHODS, assert_right, batch, limit_of, loaded, reference, same_bits

# Intermediate sizes that do not divide evenly: the last of them gives each of four sub-pools one unit of 64 and less.
SIZES = [200, 320]


@pytest.mark.parametrize("intermediate", SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_subpools(method, intermediate):
    shape = Shape(experts=4, top_k=2, hidden=144, intermediate=intermediate)
    tokens = batch(shape, 20)
    outs = []
    for count in (1, 2, 3, 4):
        wrapper = loaded(shape, method, cpuinfer_threads=count, threadpool_count=count)
        assert len(wrapper._runtime.plan.threads) == count
        out = wrapper.forward(*tokens)
        assert_right(wrapper, out, *tokens)
        exact, _ = reference(wrapper, *tokens)
        assert relative_error(out.double().numpy(), exact) <= limit_of(method).decoded
        assert same_bits(wrapper.forward(*tokens), out)
        outs.append(out.double().numpy())
    # Quantised down projections have a scale for each row and node, so the weights differ too, by their rounding.
    limit = limit_of(method).decoded + limit_of(method).original
    assert max(relative_error(out, outs[0]) for out in outs[1:]) <= limit


@pytest.mark.parametrize("method", METHODS)
def test_more_threads_than_subpools(method):
    shape = Shape(experts=4, top_k=2, hidden=144, intermediate=200)
    tokens = batch(shape, 9)
    few, many = (loaded(shape, method, cpuinfer_threads=threads, threadpool_count=2) for threads in (2, 3))
    assert same_bits(few.forward(*tokens), many.forward(*tokens))


def test_nodes_can_be_named():
    shape = Shape(experts=4, top_k=2, hidden=144, intermediate=200)
    tokens = batch(shape, 9)
    named = loaded(shape, cpuinfer_threads=2, threadpool_count=2, numa_nodes=[0, 0])
    assert len(named._runtime.plan.threads) == 2
    default = loaded(shape, cpuinfer_threads=2, threadpool_count=None, numa_nodes=[0, 0])
    assert same_bits(named.forward(*tokens), default.forward(*tokens))
