"""Any shape, any routing, any split over threads and nodes, against fp64 with a bound for every element."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from layer_limits import FORMATS, RUNNABLE, act_kind
from layer_reference import ACT_ERROR, SILU, Activation, Case, Shape, from_bf16, moe_with_bound, random_batch, to_bf16

import kt_kernel

# Workers of each node.
POOLS = [(1,), (2,), (3,), (1, 1), (2, 1), (1, 3), (1, 1, 1), (2, 1, 2)]
# The best one here, the narrow emulated one, and the one with tiles.
CHECKED = [kt_kernel.__cpu_variant__, *(name for name in ("emu", "emu_amx") if name in RUNNABLE)]


def uniform(rng, tokens, shape):
    return rng.integers(0, shape.experts, (tokens, shape.top_k))


def one_expert(rng, tokens, shape):
    return np.full((tokens, shape.top_k), rng.integers(shape.experts))


def zipf(rng, tokens, shape):
    return (rng.zipf(1.5, (tokens, shape.top_k)) - 1) % shape.experts


def few_experts(rng, tokens, shape):
    return rng.choice(rng.integers(0, shape.experts, 2), (tokens, shape.top_k))


def out_of_range(rng, tokens, shape):
    far = np.array([-1, -(2**40), -(2**63), shape.experts, 2**32, 2**62])
    return np.where(rng.random((tokens, shape.top_k)) < 0.5, rng.choice(far), uniform(rng, tokens, shape))


def none_at_all(rng, tokens, shape):
    return np.full((tokens, shape.top_k), -1)


def random_weights(rng, size):
    return rng.standard_normal(size)


def some_zero(rng, size):
    return rng.standard_normal(size) * rng.integers(0, 2, size)


def cancelling(rng, size):
    return np.resize([1.0, -1.0], size)


ROUTINGS = [uniform, one_expert, zipf, few_experts, out_of_range, none_at_all]
WEIGHTS = [random_weights, some_zero, cancelling]
ACTIVATIONS = [SILU, Activation(limit=0.5), Activation(alpha=1.702), Activation(limit=0.5, alpha=1.702)]


@dataclass(frozen=True)
class Example:
    shape: Shape
    tokens: int
    weight_format: str
    variant: str
    threads: tuple[int, ...]
    routing: object
    weights: object
    masked: bool
    activation: Activation
    seed: int


@st.composite
def examples(draw) -> Example:
    threads = draw(st.sampled_from(POOLS))
    narrowest = 64 * (len(threads) - 1) + 1  # a node takes whole units of 64
    shape = Shape(
        experts=draw(st.integers(1, 9)),
        top_k=draw(st.integers(1, 6)),
        hidden=draw(st.integers(1, 200)),
        intermediate=draw(st.integers(narrowest, 200)),
    )
    return Example(
        shape,
        tokens=draw(st.integers(0, 70)),
        weight_format=draw(st.sampled_from(FORMATS)),
        variant=draw(st.sampled_from(CHECKED)),
        threads=threads,
        routing=draw(st.sampled_from(ROUTINGS)),
        weights=draw(st.sampled_from(WEIGHTS)),
        masked=draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        seed=draw(st.integers(0, 99)),
    )


@given(examples())
def test_every_element_is_right(example):
    shape, rng = example.shape, np.random.default_rng(example.seed)
    case = Case(
        shape,
        example.weight_format,
        example.threads,
        70,
        example.variant,
        example.seed,
        activation=example.activation,
    )
    if example.masked:
        case.mask()[:] = rng.integers(0, 2, shape.experts)
    x = to_bf16(rng.standard_normal((example.tokens, shape.hidden)) * 2.0 ** rng.integers(-3, 4))
    ids = example.routing(rng, example.tokens, shape)
    weights = example.weights(rng, ids.shape).astype(np.float32)
    out = from_bf16(case.run(x, ids, weights))
    error = ACT_ERROR[act_kind(example.weight_format, example.variant)]
    expected, bound = moe_with_bound(case.decoded(), from_bf16(x), ids, weights, case.mask(), error, example.activation)
    assert (np.abs(out - expected) <= bound).all()


def test_one_wrong_id_is_beyond_the_bound():
    shape = Shape(experts=5, top_k=3, hidden=144, intermediate=200)
    x, ids, weights = random_batch(shape, 30)
    wrong = ids.copy()
    wrong[3, 0] = (ids[3, 0] + 1) % shape.experts
    for weight_format in FORMATS:
        case = Case(shape, weight_format)
        error = ACT_ERROR[act_kind(weight_format, CHECKED[0])]
        expected, bound = moe_with_bound(case.decoded(), from_bf16(x), ids, weights, act_error=error)
        beyond = np.abs(from_bf16(case.run(x, wrong, weights)) - expected) > bound
        assert beyond[3].mean() > 0.5
        assert not np.delete(beyond, 3, axis=0).any()
