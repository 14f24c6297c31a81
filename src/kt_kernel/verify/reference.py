"""What a layer should compute, in fp64, and how far a right kernel may be from it.

out[t] = sum_j weights[t, j] * down_e @ activation(gate_e @ x[t], up_e @ x[t]),  e = ids[t, j],
with biases added to each of the three products where experts have them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Weights = tuple[np.ndarray | None, np.ndarray, np.ndarray]  # gate [I, H], None without gates; up [I, H], down [H, I]
Biases = tuple[np.ndarray, np.ndarray, np.ndarray]  # [I], [I], [H]


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    intermediate: int


class Activation(NamedTuple):
    """0 turns a parameter off. Without alpha silu(g) * u, with it g * sigmoid(alpha g) * (u + 1)."""

    limit: float = 0.0
    alpha: float = 0.0
    name: str | None = None  # None: as alpha says

    def factors(self, g: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What becomes of gate and up before they are multiplied; neither has a slope above 1.13."""
        if self.limit:
            both_sides = self.alpha and self.name != "swigluoai"
            g = np.clip(g, -self.limit if both_sides else None, self.limit)
            u = np.clip(u, -self.limit, self.limit)
        if self.name == "relu2":
            return np.maximum(u, 0), np.maximum(u, 0)
        if self.name == "gelu_tanh":
            return g * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))) / 2, u
        with np.errstate(over="ignore"):  # 1 / inf is right
            return g / (1 + np.exp(-(self.alpha or 1.0) * g)), u + 1 if self.alpha else u


SILU = Activation()


def relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """mean |out - ref| / mean |ref|; of zeros, the largest |out|."""
    scale = np.abs(reference).mean() if reference.size else 0.0
    if scale == 0:
        return float(np.abs(out).max(initial=0))
    return float(np.abs(out - reference).mean() / scale)


# Largest error of a quantised activation, in units of the largest magnitude of its row: half a step.
# "rounded": weights rounded to bf16, 2^-9 of each product; the largest of a normal row is thrice the mean.
ACT_ERROR = {"bf16": 0.0, "rounded": 2.0**-10, "s16": 0.5 / 32767, "s8": 0.5 / 127}
_BF16 = 2.0**-8  # twice the relative rounding error
_F32 = 2.0**-15  # of sums of a few hundred products and of exp
# The errors of a sum's terms are independent and add up like the sides of a right angle, so this makes 8 or more
# standard deviations. The largest error in 2,500 random layers was half of it.
_MARGIN = 5.0


def add_errors(errors: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    return np.sqrt(errors**2 @ (matrix**2).T)


def ffn(
    weights: Weights, x: np.ndarray, act_error: float, activation: Activation, biases: Biases = (0.0, 0.0, 0.0)
) -> tuple[np.ndarray, np.ndarray]:
    """The expert's output, and how far a right kernel may be from it."""
    gate, up, down = (
        matrix.astype(np.float64) for matrix in (weights[1] if weights[0] is None else weights[0], *weights[1:])
    )
    dx = act_error * np.abs(x).max(axis=1, keepdims=True, initial=0) + _F32 * np.abs(x)
    g, u = x @ gate.T + biases[0], x @ up.T + biases[1]
    dg, du = add_errors(dx, gate), add_errors(dx, up)
    g, u = activation.factors(g, u)
    h = g * u
    dh = 1.13 * dg * (np.abs(u) + du) + np.abs(g) * du + _BF16 * np.abs(h)
    dh += act_error * (np.abs(h) + dh).max(axis=1, keepdims=True, initial=0) + _F32 * np.abs(h)
    return h @ down.T + biases[2], _MARGIN * add_errors(dh, down)


def moe_with_bound(
    experts, x, ids, weights, mask=(), act_error=0.0, activation=SILU, biases=None
) -> tuple[np.ndarray, np.ndarray]:
    """fp64 [T, H] of float x, and the largest error of each element. Ids out of range or masked are skipped.

    `experts` and `biases` are indexed by id: a list, or a dict of those that ids name.
    """
    out, bound = np.zeros(x.shape), np.zeros(x.shape)
    for expert in experts if isinstance(experts, dict) else range(len(experts)):
        tokens, slots = np.nonzero(ids == expert)
        if tokens.size == 0 or (len(mask) and mask[expert]):
            continue
        added = biases[expert] if biases else (0.0, 0.0, 0.0)
        y, dy = ffn(experts[expert], x[tokens].astype(np.float64), act_error, activation, added)
        w = weights[tokens, slots].astype(np.float64)[:, None]
        np.add.at(out, tokens, w * y)
        np.add.at(bound, tokens, np.abs(w) * (dy + _F32 * np.abs(y)))
    return out, bound + _BF16 * (np.abs(out) + bound)


def moe(experts, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, activation=SILU, biases=None) -> np.ndarray:
    return moe_with_bound(experts, x, ids, weights, activation=activation, biases=biases)[0]
