"""Limits and slopes of the activation, through a whole layer on every instruction set."""

import numpy as np
import pytest
from checkpoint_codes import KEPT
from layer_limits import FORMATS, LIMITS, RUNNABLE, act_kind
from layer_reference import (
    SILU,
    Activation,
    Case,
    Shape,
    from_bf16,
    moe,
    random_batch,
    relative_error,
    shared_pool,
    to_bf16,
)

from kt_kernel import _core

SHAPE = Shape(experts=4, top_k=2, hidden=256, intermediate=192)
# Half of the gates are beyond the limit.
ACTIVATIONS = [
    Activation(limit=0.6),
    Activation(alpha=1.702),
    Activation(limit=0.6, alpha=1.702),
    Activation(0.6, 1.702, "swigluoai"),
    Activation(name="gelu_tanh"),
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


WITHOUT_GATES = Activation(name="relu2")
MADE_FROM_BF16 = [name for name in FORMATS if name not in KEPT]


def without_gates(weight_format: str, variant: str | None = None, threads=(2,)) -> Case:
    case = Case(SHAPE, weight_format, threads=threads, variant=variant, activation=WITHOUT_GATES, load=())
    for expert, (_, up, down) in enumerate(case.original):
        case.layer.load_expert(expert, None, up, down)
    return case


@pytest.mark.parametrize("weight_format", MADE_FROM_BF16)
@pytest.mark.parametrize("variant", RUNNABLE)
def test_experts_without_gates(variant, weight_format):
    limit = LIMITS[weight_format, act_kind(weight_format, variant)].decoded
    for threads in ((2,), (1, 1)):
        case = without_gates(weight_format, variant, threads)
        experts = case.decoded()
        assert all(gate is None for gate, _, _ in experts)
        for tokens in (1, 40):
            batch = random_batch(SHAPE, tokens)
            out = from_bf16(case.run(*batch))
            expected = moe(experts, from_bf16(batch[0]), *batch[1:], WITHOUT_GATES)
            # A square has twice the relative error of what is squared.
            assert relative_error(out, expected) <= 2 * limit
            assert relative_error(out, -expected) > 1


def test_a_layer_without_gates_is_smaller():
    smaller, usual = without_gates("int8").layer, Case(SHAPE, "int8").layer
    assert 0.65 < smaller.packed_bytes_per_expert / usual.packed_bytes_per_expert < 0.69


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "fp8", "group_size": 128}, "experts without gates are made from bf16 weights, which fp8 is not"),
        ({"biases": True}, "experts without gates cannot have biases"),
        ({"swiglu_limit": 7.0}, "an activation without gates has no swiglu_limit"),
        ({"swiglu_alpha": 1.7}, "this activation has no swiglu_alpha"),
    ],
)
def test_what_layers_without_gates_cannot_have(options, message):
    arguments = {"format": "bf16", "num_experts": 1, "top_k": 1, "hidden_size": 64, "intermediate_size": 64}
    with pytest.raises(ValueError, match=message):
        _core.MoELayer(shared_pool((1,)), **arguments | {"max_tokens": 1, "activation": "relu2"} | options)


def test_gates_are_given_where_they_belong():
    case = without_gates("bf16")
    gate, up, down = case.original[0]
    with pytest.raises(ValueError, match="experts of this activation have no gates; pass None"):
        case.layer.load_expert(0, gate, up, down)
    with pytest.raises(ValueError, match="gate is missing"):
        Case(SHAPE).layer.load_expert(0, None, up, down)
