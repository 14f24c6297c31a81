"""Real weights: what the conversions cost SmolLM2 in perplexity, through checkpoint, `convert` and KTMoEWrapper.

Its feed-forward, cut into two halves of its neurons, is the sum of two experts that all tokens take with weight 1.
"""

from functools import cache
from math import exp
from pydoc_data.topics import topics

import numpy as np
import pytest
from convert_cases import run
from layer_reference import Shape, to_bf16
from smollm2 import HIDDEN, INTERMEDIATE, LAYERS, Model, torch
from weight_files import checkpoint_tensors, write_safetensors

from kt_kernel import KTMoEWrapper

EXPERTS = 2
SHAPE = Shape(EXPERTS, EXPERTS, HIDDEN, INTERMEDIATE // EXPERTS)
TOKENS = 160  # of each of three pages of the documentation of Python, which every Python has
PAGES = ("objects", "exceptions", "typesmapping")


def experts_of(model: Model, layer: int) -> list:
    gate, up, down = (to_bf16(model.weight(f"blk.{layer}.ffn_{name}").numpy()) for name in ("gate", "up", "down"))
    halves = [slice(e * SHAPE.intermediate, (e + 1) * SHAPE.intermediate) for e in range(EXPERTS)]
    return [(gate[half], up[half], np.ascontiguousarray(down[:, half])) for half in halves]


@pytest.fixture(scope="module")
def model():
    return Model()


@pytest.fixture(scope="module")
def source(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    for layer in range(LAYERS):
        tensors = checkpoint_tensors(experts_of(model, layer), f"model.layers.{layer}", "separate")
        write_safetensors(folder / f"model-{layer:02d}.safetensors", tensors)
    return folder


@pytest.fixture(scope="module")
def perplexity(model):
    pages = [model.tokens(topics[page])[:TOKENS] for page in PAGES]

    @cache
    def measure(path, method: str) -> float:
        layers = []
        for layer in range(LAYERS):
            layers.append(
                KTMoEWrapper(layer, EXPERTS, EXPERTS, HIDDEN, SHAPE.intermediate, cpuinfer_threads=2,
                             threadpool_count=1, chunked_prefill_size=TOKENS, weight_path=path, method=method)
            )  # fmt: skip
            layers[-1].load_weights()
        ids, weights = torch.arange(EXPERTS).repeat(TOKENS, 1), torch.ones(TOKENS, EXPERTS)

        def ffn(layer: int, x: torch.Tensor) -> torch.Tensor:
            return layers[layer].forward(x.bfloat16(), ids[: len(x)], weights[: len(x)]).float()

        return exp(sum(model.loss(page, ffn) for page in pages) / len(pages))

    return measure


@pytest.mark.timeout(900)
def test_int4g_costs_at_most_half_of_what_int4_does(source, perplexity, tmp_path, capsys):
    exact = perplexity(source, "BF16")
    assert exact < 40  # it is the model, and the tokens are right
    found = {}
    for quant_method, search in (("int4", False), ("int4", True), ("int4g", False), ("int4g", True), ("int8", False)):
        path = tmp_path / f"{quant_method}-{search}"
        outcome, _ = run(source, path, quant_method, search=search)
        found[quant_method, search] = perplexity(path, outcome.method) - exact, outcome.quality["error"]["all"]
    with capsys.disabled():
        print(f"\nperplexity of SmolLM2: {exact:.3f} in bf16; more than that, and error of the weights:")
        for (quant_method, search), (more, error) in found.items():
            print(f"  {quant_method:<6}{'searched' if search else 'largest':<9}{more:+8.3f}  {error:.2%}")
    more = {key: increase for key, (increase, _) in found.items()}
    assert more["int4g", True] <= more["int4", False] / 2
    assert more["int4g", False] <= more["int4", False] / 2
    assert more["int4", True] < more["int4", False]
    assert abs(more["int8", False]) < 0.05 * more["int4", False]
