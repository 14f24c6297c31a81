"""Kernels against fp64: one format on every instruction set that runs here, on edge shapes and for a few T.

Two things are compared for each layer: the weights that it says it has with those that were put in, and its output
with that of ``reference``, element by element.
"""

from dataclasses import asdict, dataclass, field

import numpy as np

from kt_kernel import _core, runtime
from kt_kernel.verify.codes import GROUP_SIZES
from kt_kernel.verify.limits import LIMITS, act_kind
from kt_kernel.verify.random_experts import Expert, block_of, random_expert
from kt_kernel.verify.reference import ACT_ERROR, Shape, Weights, moe_with_bound, relative_error
from kt_kernel.weights.floats import to_bf16, to_f32

# No size is a multiple of a panel pair (32 rows) or of a line; those of GGUF types are made of whole blocks.
_EDGE = {1: Shape(5, 3, 144, 200), 32: Shape(5, 3, 160, 224), 256: Shape(4, 2, 256, 512)}
_LARGE = Shape(3, 2, 768, 512)
# Rows that few-row kernels take (1, 2), that blocks of 8 leave over (5, 9), and more than 32.
_TOKENS, _QUICK_TOKENS = (1, 2, 5, 9, 40), (1, 9, 40)
# f32 products of a code and its scales, each rounded.
_WEIGHT_ERROR = 2.0**-22
_MOST = 1e6  # no share is larger: JSON has no infinity


@dataclass
class Outcome:
    """A format on one instruction set."""

    format: str
    variant: str
    relative_error: float = 0.0  # against the weights as packed, the worst layer
    limit_share: float = 0.0  # the largest error, as a share of what a right kernel may have
    loss: float | None = None  # relative error against the weights before they were quantised
    layers: int = 0
    calls: int = 0
    failures: list[str] = field(default_factory=list)

    def fail(self, text: str) -> None:
        self.failures.append(text)


def check_format(weight_format: str, variants: list[str], quick: bool = False) -> list[dict]:
    """One outcome for each variant, in plain values."""
    outcomes = [Outcome(weight_format, variant) for variant in variants]
    edge = _EDGE[block_of(weight_format)]
    whole = _pool_of_this_machine()
    if quick:
        _check_layers(outcomes, edge, whole, "", _QUICK_TOKENS)
    else:
        _check_layers(outcomes, edge, whole, "", _TOKENS)
        _check_layers(outcomes, edge, _core.Pool([1, 1], spin_us=0), ", 2 sub-pools", _TOKENS)
        _check_layers(outcomes, _LARGE, whole, "", _QUICK_TOKENS)
    return [asdict(outcome) for outcome in outcomes]


def _pool_of_this_machine() -> "_core.Pool":
    plan = runtime.plan_pool(None, None, None)
    return _core.Pool(list(plan.threads), list(plan.numa_ids), [list(cpus) for cpus in plan.cpus])


def _check_layers(
    outcomes: list[Outcome], shape: Shape, pool: "_core.Pool", where: str, tokens: tuple[int, ...]
) -> None:
    """The same experts on every variant; what they must give is computed once."""
    weight_format = outcomes[0].format
    experts = [random_expert(weight_format, shape, expert) for expert in range(shape.experts)]
    batches = [_Batch(shape, count) for count in tokens]
    first: list[Weights] | None = None
    for outcome in outcomes:
        layer = _core.MoELayer(
            pool,
            format=weight_format,
            num_experts=shape.experts,
            top_k=shape.top_k,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            max_tokens=max(tokens),
            variant=outcome.variant,
            group_size=GROUP_SIZES.get(weight_format, 0),
        )
        for slot, expert in enumerate(experts):
            expert.load(layer, slot)
        where_now = f"H={shape.hidden} I={shape.intermediate}{where}"
        if first is None or shape is not _LARGE:  # decoding is the slow part
            decoded = [layer.decode_expert(slot) for slot in range(shape.experts)]
            first = first or decoded
            _check_weights(outcome, where_now, experts, decoded, first)
        seen = [expert.exact or packed for expert, packed in zip(experts, first, strict=True)]
        # The limits of what quantising loses are those of small layers: the largest of more weights is larger.
        originals = [None if shape is _LARGE else expert.original for expert in experts]
        for batch in batches:
            _check_output(outcome, where_now, layer, batch, seen, originals)
        outcome.layers += 1


def _check_weights(
    outcome: Outcome, where: str, experts: list[Expert], decoded: list[Weights], first: list[Weights]
) -> None:
    for expert, packed, before in zip(experts, decoded, first, strict=True):
        if expert.exact is not None:
            far = max(
                float(np.abs(ours - exact).max() / np.abs(exact).max())
                for ours, exact in zip(packed, expert.exact, strict=True)
            )
            if not far <= _WEIGHT_ERROR:
                outcome.fail(f"{where}: weights are {far:.2g} of the largest one off what was put in")
                return
        if not all(np.array_equal(ours, other) for ours, other in zip(packed, before, strict=True)):
            outcome.fail(f"{where}: weights are not packed as on other instruction sets")
            return


class _Batch:
    """Inputs of a call; some ids name no expert and must be skipped."""

    def __init__(self, shape: Shape, tokens: int):
        rng = np.random.default_rng([tokens, 7])
        self.x = to_bf16(rng.standard_normal((tokens, shape.hidden), np.float32), "x")
        every = np.tile(np.arange(shape.experts), (tokens, 1))
        self.ids = np.ascontiguousarray(rng.permuted(every, axis=1)[:, : shape.top_k].astype(np.int64))
        self.ids[1::4, 0] = -1
        self.weights = rng.standard_normal((tokens, shape.top_k)).astype(np.float32)
        self._expected: dict[tuple[str, float], tuple[np.ndarray, np.ndarray]] = {}

    def expected(self, which: str, experts: list[Weights], act_error: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Output and bound of the experts of this name; kept, since variants share them."""
        key = which, act_error
        if key not in self._expected:
            x = to_f32(self.x)
            self._expected[key] = moe_with_bound(experts, x, self.ids, self.weights, act_error=act_error)
        return self._expected[key]

    def run(self, layer: "_core.MoELayer") -> np.ndarray:
        out = np.full_like(self.x, 0x7FC0)  # NaN: what is not written shows
        layer.forward(len(self.x), *(array.ctypes.data for array in (self.ids, self.weights, self.x, out)))
        return to_f32(out).astype(np.float64)


def _check_output(
    outcome: Outcome,
    where: str,
    layer: "_core.MoELayer",
    batch: _Batch,
    seen: list[Weights],
    originals: list[Weights | None],
) -> None:
    kinds = {act_kind(part, outcome.variant) for part in outcome.format.split("/")}
    exact, bound = batch.expected("packed", seen, max(ACT_ERROR[kind] for kind in kinds))
    out = batch.run(layer)
    outcome.calls += 1
    where = f"{where} T={len(out)}"
    if not np.isfinite(out).all():
        outcome.fail(f"{where}: an output is not a finite number")
        return
    share = limit_share(out, exact, bound)
    outcome.limit_share = max(outcome.limit_share, share)
    outcome.relative_error = max(outcome.relative_error, relative_error(out, exact))
    if not share <= 1:
        outcome.fail(f"{where}: an output is {share:.2g} times as far off as a right kernel may be")
    if originals[0] is not None:
        lost = relative_error(out, batch.expected("original", originals)[0])
        outcome.loss = max(outcome.loss or 0.0, lost)
        limit = LIMITS[outcome.format, kinds.pop()].original
        # Of a few numbers the mean is no mean: limits are those of layers with thousands of outputs.
        if len(out) > 8 and not lost <= limit:
            outcome.fail(f"{where}: {lost:.2g} off the original weights; {limit:.2g} is the limit of {outcome.format}")


def limit_share(out: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> float:
    """The largest error of finite outputs in units of what is allowed at its place; where none is, _MOST."""
    errors = np.abs(out - exact)
    allowed = np.maximum(bound, errors / _MOST)
    return float(np.divide(errors, allowed, out=np.zeros_like(errors), where=errors > 0).max(initial=0.0))
