"""A dense feed-forward as experts that are chosen token by token and add up to it.

    down (silu(gate x) * up x) = sum over slices of neurons s = sum_s FFN_s(x)

Each of the 8 slices becomes two experts that compute the same with other numbers: neurons in another order, and
up * 2, down / 2 in one, up / 2, down * 2 in the other. The router has a row r_s for one and -r_s for the other, so that
of each pair exactly one has a positive logit, and the best 8 of 16 are one of each pair. Logits are so small that the 8
weights are 1/8 each, nearly; down is multiplied by 8. All factors are powers of two: nothing is rounded by them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

SLICES = 8
COPIES = 2
EXPERTS = SLICES * COPIES

# Deviation of a logit. Weights are off by this much, less than bf16 rounds (2^-9). Not smaller: where two pairs have
# logits that f32 cannot tell apart after the softmax (2^-24), one pair may get both places. At 2^-11 that happens to
# one of about 4 million tokens in a layer.
LOGIT_DEVIATION = 2.0**-11


class Expert(NamedTuple):
    gate: np.ndarray  # [I / 8, H]
    up: np.ndarray
    down: np.ndarray  # [H, I / 8]


class Layer(NamedTuple):
    gate: np.ndarray  # [I, H]
    up: np.ndarray
    down: np.ndarray  # [H, I]
    norm: np.ndarray  # [H]: what the rows before the feed-forward, of mean square 1, are multiplied with


class Places(NamedTuple):
    """Which expert is which copy of which slice; another order in each layer."""

    experts: np.ndarray  # [SLICES, COPIES]

    def slice_of(self, expert: int) -> int:
        return int(np.argwhere(self.experts == expert)[0, 0])


def places(layer_idx: int) -> Places:
    return Places(_random(layer_idx, 0).permutation(EXPERTS).reshape(SLICES, COPIES))


def router(layer: Layer, layer_idx: int) -> np.ndarray:
    """f32 [EXPERTS, H]."""
    directions = _random(layer_idx, 1).standard_normal((SLICES, len(layer.norm)))
    directions *= LOGIT_DEVIATION / np.linalg.norm(directions * layer.norm, axis=1, keepdims=True)
    rows = np.empty((EXPERTS, len(layer.norm)), np.float32)
    first, second = places(layer_idx).experts.T
    rows[first], rows[second] = directions, -directions
    return rows


def experts(layer: Layer, layer_idx: int) -> Iterator[tuple[int, Expert]]:
    """Each with its id."""
    rng, neurons = _random(layer_idx, 2), len(layer.gate) // SLICES
    for index, copies in enumerate(places(layer_idx).experts):
        for expert, factor in zip(copies, (2.0, 0.5), strict=True):
            order = index * neurons + rng.permutation(neurons)
            up, down = layer.up[order] * np.float32(factor), layer.down[:, order] * np.float32(SLICES / factor)
            yield int(expert), Expert(layer.gate[order], up, down)


def _random(layer_idx: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([135, layer_idx, purpose])
