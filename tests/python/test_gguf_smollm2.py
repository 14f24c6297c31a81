"""Real weights: the dense feed-forward of SmolLM2, cut into experts that all have weight 1, stays what it is."""

from functools import cached_property
from pydoc_data.topics import topics
from typing import NamedTuple

import pytest
from layer_limits import act_kind
from smollm2 import HIDDEN, INTERMEDIATE, LAYERS, Model, torch

import kt_kernel
from kt_kernel import KTMoEWrapper

TOKENS = 256  # of a page of the documentation of Python, which every Python has


class Limits(NamedTuple):
    layer: float  # mean |out - dense| / mean |dense| of a layer
    loss: float  # difference of log perplexity


# What the kernels read as activations -> limits: about twice what rounding these rows in torch costs. Outliers of real
# activations cost s8 more than normal ones do.
LIMITS = {
    "bf16": Limits(0.005, 0.001),
    "rounded": Limits(0.006, 0.002),
    "s16": Limits(0.005, 0.001),
    "s8": Limits(0.08, 0.01),
}


class Dense:
    """The model as it is, and what its feed-forwards see."""

    def __init__(self):
        self.model = Model()
        self.tokens = self.model.tokens(topics["objects"])[:TOKENS]
        self.inputs: list[torch.Tensor] = []

    @cached_property
    def loss(self) -> float:
        def ffn(layer: int, x: torch.Tensor) -> torch.Tensor:
            self.inputs.append(x)
            return self.model.dense_ffn(layer, x)

        return self.model.loss(self.tokens, ffn)


@pytest.fixture(scope="module")
def dense():
    found = Dense()
    assert found.loss < 3.2  # perplexity 25: it is the model, the tokens are right, and so is the reference
    return found


def limits() -> Limits:
    return LIMITS[act_kind("q4_1", kt_kernel.__cpu_variant__)]


def experts(dense: Dense, folder, count: int, layers: range) -> dict[int, KTMoEWrapper]:
    """Layers from a file, with experts in another order in each."""
    path = dense.model.write_experts(folder / f"{count}-experts.gguf", count, layers)
    found = {}
    for layer in layers:
        found[layer] = KTMoEWrapper(
            layer_idx=layer,
            num_experts=count,
            num_experts_per_tok=count,
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE // count,
            cpuinfer_threads=2,
            threadpool_count=1,
            weight_path=path,
            method="auto",
        )
        assert found[layer].method == "LLAMAFILE"
        found[layer].load_weights([(expert + layer) % count for expert in range(count)])
        assert found[layer].moe.format == "q4_1"
    return found


def forward(wrapper: KTMoEWrapper, x: torch.Tensor) -> torch.Tensor:
    ids = torch.arange(wrapper.num_experts).expand(len(x), -1).contiguous()
    return wrapper.forward(x.bfloat16(), ids, torch.ones(ids.shape))


@pytest.mark.parametrize(
    ("count", "layers"), [(8, range(LAYERS)), (1, range(0, LAYERS, 10)), (16, range(LAYERS)[::10]), (48, range(1))]
)
def test_layer_by_layer(count, layers, dense, tmp_path):
    worst = 0.0
    for layer, wrapper in experts(dense, tmp_path, count, layers).items():
        x = dense.inputs[layer][:32].bfloat16()
        exact = dense.model.dense_ffn(layer, x.double())
        worst = max(worst, float((forward(wrapper, x).double() - exact).abs().mean() / exact.abs().mean()))
        one = forward(wrapper, x[5:6]).double()  # another path through the kernels
        worst = max(worst, float((one - exact[5:6]).abs().mean() / exact[5:6].abs().mean()))
    assert worst < limits().layer


def test_perplexity(dense, tmp_path):
    layers = experts(dense, tmp_path, 8, range(LAYERS))
    loss = dense.model.loss(dense.tokens, lambda layer, x: forward(layers[layer], x).float())
    assert abs(loss - dense.loss) < limits().loss
