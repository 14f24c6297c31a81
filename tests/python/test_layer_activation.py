"""Limits and slopes of the activation, through a whole layer on every instruction set."""

import numpy as np
import pytest
from checkpoint_codes import KEPT
from layer_limits import FORMATS, LIMITS, RUNNABLE, act_kind
from layer_reference import SILU, Activation, Case, Shape, from_bf16, moe, random_batch, relative_error, to_bf16

SHAPE = Shape(experts=4, top_k=2, hidden=256, intermediate=192)
# Half of the gates are beyond the limit.
ACTIVATIONS = [
    Activation(limit=0.6),
    Activation(alpha=1.702),
    Activation(limit=0.6, alpha=1.702),
    Activation(0.6, 1.702, "swigluoai"),
]
# Formats that keep codes differ in how weights are decoded only, so two of them stand for all.
SOME = [name for name in FORMATS if name not in KEPT or name in ("fp8", "int4z")]
EVERY_KERNEL = [(variant, name) for variant in RUNNABLE for name in SOME]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("variant", "weight_format"), EVERY_KERNEL)
def test_the_activation_is_the_one_asked_for(variant, weight_format, activation):
    case = Case(SHAPE, weight_format, threads=(2,), variant=variant, activation=activation)
    limit = LIMITS[weight_format, act_kind(weight_format, variant)].decoded
    experts = case.decoded()
    for tokens in (1, 40):
        x, ids, weights = random_batch(SHAPE, tokens)
        out = from_bf16(case.run(x, ids, weights))
        expected = moe(experts, from_bf16(x), ids, weights, activation)
        assert relative_error(out, expected) <= limit
        others = [moe(experts, from_bf16(x), ids, weights, other) for other in (SILU, *ACTIVATIONS)]
        assert sum(relative_error(out, other) <= 2 * limit for other in others) == 1


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_limit_out_of_reach_changes_no_bit(weight_format):
    batch = random_batch(SHAPE, 20)
    plain, limited = (Case(SHAPE, weight_format, activation=a) for a in (SILU, Activation(limit=1e30)))
    assert np.array_equal(plain.run(*batch), limited.run(*batch))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("variant", "weight_format"), EVERY_KERNEL)
def test_nan_is_not_clamped_away(variant, weight_format, activation):
    case = Case(SHAPE, weight_format, threads=(2,), variant=variant, activation=activation)
    for tokens in (6, 40):
        x, ids, weights = random_batch(SHAPE, tokens)
        clean = case.run(x, ids, weights)
        x[2, 5] = to_bf16(np.array([np.nan]))[0]
        out = case.run(x, ids, weights)
        assert np.array_equal(np.delete(out, 2, axis=0), np.delete(clean, 2, axis=0))
        assert np.isnan(from_bf16(out[2])).all()
