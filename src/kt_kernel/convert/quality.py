"""How far converted weights are from the original ones.

The error of a tensor, or of several, is sqrt(sum (w - converted)^2 / sum w^2): 0.01 is 1 %.
"""

from collections.abc import Iterable
from math import sqrt

from kt_kernel.weights.converting import SquaredError
from kt_kernel.weights.experts import PROJECTIONS

WORST = 10  # tensors that are named

Sums = dict[str, list[float]]  # projection -> squared error and weight


def relative(error: float, weight: float) -> float:
    return sqrt(error / weight) if weight > 0 else 0.0


def of_layer(errors: list[list[SquaredError]]) -> dict[str, object]:
    """What the record of a layer keeps: sums for each projection, and the worst tensors."""
    tensors = [
        {"projection": projection, "expert": expert, "error": relative(*sums)}
        for expert, of_expert in enumerate(errors)
        for projection, sums in zip(PROJECTIONS, of_expert, strict=True)
    ]
    sums = {
        projection: [sum(of_expert[p].error for of_expert in errors), sum(of_expert[p].weight for of_expert in errors)]
        for p, projection in enumerate(PROJECTIONS)
    }
    return {"sums": sums, "worst": _worst(tensors)}


def report(records: dict[int, dict], about: dict[str, object]) -> dict[str, object]:
    """Of a whole conversion; records of layers have what of_layer() gave as "quality"."""
    layers = {layer: record["quality"] for layer, record in sorted(records.items())}
    return {
        **about,
        "error": _errors(quality["sums"] for quality in layers.values()),
        "layers": {str(layer): _errors([quality["sums"]]) for layer, quality in layers.items()},
        "worst": _worst({"layer": layer, **tensor} for layer, quality in layers.items() for tensor in quality["worst"]),
    }


def _errors(parts: Iterable[Sums]) -> dict[str, float]:
    """For each projection, and for all together."""
    parts = list(parts)
    of = {p: [sum(part[p][i] for part in parts) for i in range(2)] for p in PROJECTIONS}
    whole = [sum(sums[i] for sums in of.values()) for i in range(2)]
    return {name: round(relative(*sums), 6) for name, sums in {**of, "all": whole}.items()}


def _worst(tensors: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    return sorted(tensors, key=lambda tensor: -tensor["error"])[:WORST]
