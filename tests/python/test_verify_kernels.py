"""``kt verify``: right kernels pass, and each way to be wrong is found."""

import numpy as np
import pytest

import kt_kernel
from kt_kernel import _core
from kt_kernel.verify import codes, gpu_slices, kernels, random_experts
from kt_kernel.verify.codes import Encoded, encode
from kt_kernel.verify.random_experts import formats, random_expert

VARIANT = kt_kernel.__cpu_variant__


def failures(weight_format: str) -> list[str]:
    (outcome,) = kernels.check_format(weight_format, [VARIANT], quick=True)
    return outcome["failures"]


@pytest.mark.parametrize("weight_format", formats())
def test_every_format_of_the_core(weight_format):
    (outcome,) = kernels.check_format(weight_format, [VARIANT], quick=True)
    assert outcome["failures"] == []
    assert 0 < outcome["relative_error"] < 0.03
    assert 0 < outcome["limit_share"] < 0.7
    assert (outcome["loss"] is not None) == (weight_format in random_experts.QUANTISED)


def test_every_instruction_set_on_several_shapes_and_pools():
    native = [variant.name for variant in _core.variants() if variant.runnable and not variant.emulated]
    found = kernels.check_format("rawint4", native)
    assert [outcome["variant"] for outcome in found] == native
    assert all(outcome["failures"] == [] and outcome["layers"] == 3 for outcome in found)


@pytest.mark.parametrize("weight_format", codes.GROUP_SIZES)
def test_a_scale_that_is_wrong_is_found(weight_format, monkeypatch):
    """The control: what is loaded has scales of 1.01, its meaning those that were given."""

    def wrong(name: str, weights: np.ndarray) -> Encoded:
        return Encoded(encode(name, 1.01 * weights).matrix, encode(name, weights).meaning)

    monkeypatch.setattr(random_experts, "encode", wrong)
    assert "of the largest one off what was put in" in failures(weight_format)[0]


@pytest.mark.parametrize("weight_format", ["int8", "int4", "int4g"])
def test_quantising_that_loses_too_much_is_found(weight_format, monkeypatch):
    def wrong(name, shape, expert):
        made = random_expert(name, shape, expert)
        return random_experts.Expert(made.load, tuple(1.4 * matrix for matrix in made.original), None)

    monkeypatch.setattr(kernels, "random_expert", wrong)
    assert "off the original weights" in failures(weight_format)[0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda out: out * 1.05, "times as far off as a right kernel may be"),
        (lambda out: np.where(np.arange(out.size).reshape(out.shape) == 5, 0.0, out), "times as far off"),
        (lambda out: np.where(np.arange(out.size).reshape(out.shape) == 5, np.nan, out), "not a finite number"),
        (lambda out: out[::-1], "times as far off"),
    ],
    ids=["a scale", "one output", "not a number", "tokens in another order"],
)
def test_outputs_that_are_wrong_are_found(wrong, said, monkeypatch):
    right = kernels._Batch.run
    monkeypatch.setattr(kernels._Batch, "run", lambda self, layer: wrong(right(self, layer)))
    assert any(said in failure for failure in failures("bf16"))


def test_packing_that_differs_between_instruction_sets_is_found(monkeypatch):
    seen = []

    def wrong(*arguments):
        seen.append(arguments)
        factor = 1.0 if len(seen) == 1 else 1.25
        return [tuple(factor * matrix for matrix in weights) for weights in arguments[0]]

    outcome = kernels.Outcome("int8", VARIANT)
    experts = [random_expert("int8", kernels._EDGE[1], 0)]
    weights = [experts[0].original]
    kernels._check_weights(outcome, "here", experts, wrong(weights), weights)
    assert outcome.failures == []
    kernels._check_weights(outcome, "here", experts, wrong(weights), weights)
    assert outcome.failures == ["here: weights are not packed as on other instruction sets"]


@pytest.mark.parametrize("weight_format", gpu_slices.FORMATS)
def test_slices_for_gpus_are_the_bytes_of_the_file(weight_format, monkeypatch):
    assert gpu_slices.check_slices(weight_format)["failures"] == []
    right = gpu_slices.Experts.slices
    monkeypatch.setattr(gpu_slices.Experts, "slices", lambda self, expert, ranks, rank: right(self, 0, ranks, rank))
    assert "slices from 1 sub-pools: w13_weight of rank 0 of 1" in gpu_slices.check_slices(weight_format)["failures"]


def test_shares_of_the_limit():
    exact, bound = np.zeros((1, 3)), np.array([[2.0, 2.0, 0.0]])
    assert kernels.limit_share(np.array([[1.0, 0.0, 0.0]]), exact, bound) == 0.5
    assert kernels.limit_share(np.array([[0.0, 0.0, 1.0]]), exact, bound) == pytest.approx(1e6)
    assert kernels.limit_share(exact, exact, bound) == 0
