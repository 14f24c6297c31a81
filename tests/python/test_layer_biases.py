"""Experts with biases, in every format and on every instruction set, against fp64."""

import numpy as np
import pytest
from layer_limits import FORMATS, RUNNABLE, act_kind
from layer_reference import (
    ACT_ERROR,
    SILU,
    Activation,
    Case,
    Shape,
    from_bf16,
    moe,
    moe_with_bound,
    random_batch,
    random_biases,
    relative_error,
)

import kt_kernel

# No size is a multiple of a panel, and the nodes' parts of the intermediate differ.
SHAPE = Shape(experts=5, top_k=3, hidden=150, intermediate=200)
BIASES = random_biases(SHAPE)
SWIGLUOAI = Activation(1.0, 1.702, "swigluoai")
NODES = [(1,), (2,), (1, 1), (2, 1, 1)]


def biased(weight_format="bf16", activation=SWIGLUOAI, biases=BIASES, **options) -> Case:
    return Case(SHAPE, weight_format, activation=activation, biases=biases, **options)


def check(case: Case, variant, x, ids, weights, mask=(), activation=SWIGLUOAI, **options) -> None:
    error = ACT_ERROR[act_kind(case.layer.format, variant)]
    exact, bound = moe_with_bound(case.decoded(), from_bf16(x), ids, weights, mask, error, activation, BIASES)
    assert (np.abs(from_bf16(case.run(x, ids, weights, **options)) - exact) <= bound).all()


@pytest.mark.parametrize("activation", [SILU, SWIGLUOAI])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("variant", RUNNABLE)
def test_every_kernel(variant, weight_format, activation):
    case = biased(weight_format, activation, threads=(2,), variant=variant)
    for tokens in (1, 5, 40):
        check(case, variant, *random_batch(SHAPE, tokens), activation=activation)


@pytest.mark.parametrize("threads", NODES)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_nodes_masks_and_duplicates(weight_format, threads):
    case = biased(weight_format, threads=threads)
    for tokens in (1, 7, 60):
        x, ids, weights = random_batch(SHAPE, tokens)
        check(case, kt_kernel.__cpu_variant__, x, ids, weights)
        ids[:, 1] = ids[:, 0]
        ids[0, 2] = -1
        check(case, kt_kernel.__cpu_variant__, x, ids, weights)
        skip = np.zeros(SHAPE.experts, np.uint8)
        skip[1] = 1
        check(case, kt_kernel.__cpu_variant__, x, ids, weights, mask=skip, skip=skip)


def test_each_bias_counts_once():
    batch = random_batch(SHAPE, 12)
    expected = from_bf16(biased().run(*batch))
    for threads in NODES:
        assert relative_error(from_bf16(biased(threads=threads).run(*batch)), expected) < 0.005
    for part in range(3):
        changed = [tuple(0 * b if i == part else b for i, b in enumerate(biases)) for biases in BIASES]
        assert relative_error(from_bf16(biased(biases=changed).run(*batch)), expected) > 0.05


def test_biases_of_zero_change_no_bit():
    zeros = [tuple(np.zeros_like(b) for b in biases) for biases in BIASES]
    for weight_format in FORMATS:
        batch = random_batch(SHAPE, 20)
        plain = Case(SHAPE, weight_format, activation=SWIGLUOAI).run(*batch)
        assert np.array_equal(biased(weight_format, biases=zeros).run(*batch), plain)


def test_nan_of_a_bias_stays_with_its_expert():
    biases = list(BIASES)
    biases[2] = (biases[2][0], np.full_like(biases[2][1], np.nan), biases[2][2])
    x, ids, weights = random_batch(SHAPE, 20)
    out = from_bf16(biased(biases=biases).run(x, ids, weights))
    assert np.array_equal(np.isnan(out).all(axis=1), (ids == 2).any(axis=1))
    assert np.array_equal(np.isnan(out).any(axis=1), (ids == 2).any(axis=1))


def test_biases_can_be_replaced():
    case = biased()
    others = random_biases(SHAPE, seed=1)
    for expert, biases in enumerate(others):
        case.layer.load_biases(expert, *biases)
    batch = random_batch(SHAPE, 6)
    assert np.array_equal(case.run(*batch), biased(biases=others).run(*batch))


def test_an_expert_needs_weights_and_biases():
    case = biased(load=[0, 1, 2])
    assert case.layer.loaded_experts == 3
    case.load(3, case.original[3])
    case.layer.load_biases(4, *BIASES[4])
    assert case.layer.loaded_experts == 3
    x, ids, weights = random_batch(SHAPE, 4)
    for missing, what in ((3, "biases"), (4, "weights")):
        ids[:] = [[0, 1, missing]] * 4
        with pytest.raises(ValueError, match=f"expert {missing} of this layer has no {what}; load them, or mask"):
            case.run(x, ids, weights)
    case.layer.load_biases(3, *BIASES[3])
    case.load(4, case.original[4])
    assert case.layer.loaded_experts == 5
    assert np.array_equal(case.run(x, ids, weights), biased().run(x, ids, weights))


def test_random_weights_need_no_biases():
    case = biased(load=[])
    case.layer.fill_random(1)
    assert case.layer.loaded_experts == 5
    x, ids, weights = random_batch(SHAPE, 4)
    expected = moe(case.decoded(), from_bf16(x), ids, weights, SWIGLUOAI)
    assert relative_error(from_bf16(case.run(x, ids, weights)), expected) < 0.01


def test_wrong_biases():
    case, good = biased(load=[]), BIASES[0]
    with pytest.raises(ValueError, match=r"^expert 5 is not in 0\.\.4"):
        case.layer.load_biases(5, *good)
    with pytest.raises(ValueError, match=r"^the bias of gate has shape \[150\]; this layer needs \[200\]"):
        case.layer.load_biases(0, *good[::-1])
    with pytest.raises(ValueError, match=r"^the bias of down has shape \[1, 150\]; this layer needs \[150\]"):
        case.layer.load_biases(0, *good[:2], good[2][None])
    with pytest.raises(TypeError, match=r"^the bias of up must hold f32"):
        case.layer.load_biases(0, good[0], good[1].astype(np.float64), good[2])
    plain = Case(SHAPE)
    with pytest.raises(ValueError, match=r"no room for biases; make it with biases=True"):
        plain.layer.load_biases(0, *good)
    assert (case.layer.biases, plain.layer.biases) == (True, False)


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        (Activation(name="gelu"), "activation 'gelu' is unknown; the activations are: silu, swiglu_alpha, swigluoai, "),
        (Activation(alpha=1.0, name="silu"), "this activation has no swiglu_alpha"),
        (Activation(limit=7.0, name="swigluoai"), "needs a swiglu_alpha above 0"),
        (Activation(name="swiglu_alpha"), "needs a swiglu_alpha above 0"),
    ],
)
def test_wrong_activations(activation, message):
    with pytest.raises(ValueError, match=message):
        Case(SHAPE, activation=activation)


def test_the_named_activations_are_those_of_the_parameters():
    batch = random_batch(SHAPE, 9)
    for parameters, name in ((Activation(0.5), "silu"), (Activation(0.5, 1.7), "swiglu_alpha")):
        named = Case(SHAPE, activation=parameters._replace(name=name))
        assert np.array_equal(named.run(*batch), Case(SHAPE, activation=parameters).run(*batch))
