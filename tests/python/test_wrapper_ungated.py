"""Experts without gates through KTMoEWrapper: load_weights_from_tensors(None, up, down)."""

import pytest
from wrapper_cases import SHAPE, batch, make, tensors, torch

LIMITS = {"BF16": 0.01, "AMXINT8": 0.03}


@pytest.mark.parametrize("method", LIMITS)
def test_forward(method):
    _, up, down = tensors()
    wrapper = make(method=method, activation="relu2")
    wrapper.load_weights_from_tensors(None, up, down)
    x, ids, weights = batch()
    hidden = torch.einsum("th,tkih->tki", x.float(), up.float()[ids]).relu().square()
    exact = torch.einsum("tki,tkhi,tk->th", hidden, down.float()[ids], weights)
    assert (wrapper.forward(x, ids, weights).float() - exact).norm() / exact.norm() < LIMITS[method]


def test_gates_must_fit_the_activation():
    gate, up, down = tensors()
    with pytest.raises(ValueError, match="have no gates; pass None"):
        make(activation="relu2").load_weights_from_tensors(gate, up, down)
    with pytest.raises(ValueError, match="gate is missing"):
        make().load_weights_from_tensors(None, up, down)
    with pytest.raises(
        ValueError, match=rf"up_proj has shape .* it must be \[E, {SHAPE.intermediate}, {SHAPE.hidden}\]"
    ):
        make(activation="relu2").load_weights_from_tensors(None, up[:, :3], down)
