"""Every format on every instruction set, against fp64 and against each other."""

import numpy as np
import pytest
from layer_limits import FORMATS, LIMITS, RUNNABLE, VARIANTS, act_kind
from layer_reference import Case, Shape, from_bf16, moe, random_batch, relative_error

SHAPE = Shape(experts=6, top_k=2, hidden=384, intermediate=320)
# Streamed rows, one register tile, blocks of rows.
TOKENS = (1, 4, 48)
_reference: dict = {}


def reference(case: Case, weight_format: str, batch) -> tuple[np.ndarray, np.ndarray]:
    """From decoded and from original weights; packed weights are the same on every variant (a test below)."""
    key = (weight_format, len(batch[0]))
    if key not in _reference:
        x, ids, weights = batch
        original = [tuple(from_bf16(matrix) for matrix in expert) for expert in case.original]
        _reference[key] = tuple(moe(experts, from_bf16(x), ids, weights) for experts in (case.decoded(), original))
    return _reference[key]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("variant", RUNNABLE)
def test_error_is_within_the_table(variant, weight_format, measured_errors):
    limit = LIMITS[weight_format, act_kind(weight_format, variant)]
    case = Case(SHAPE, weight_format, threads=(2,), variant=variant)
    worst = (0.0, 0.0)
    for tokens in TOKENS:
        batch = random_batch(SHAPE, tokens)
        out = from_bf16(case.run(*batch))
        errors = (relative_error(out, expected) for expected in reference(case, weight_format, batch))
        worst = tuple(max(pair) for pair in zip(worst, errors, strict=True))
    measured_errors[variant, weight_format] = worst
    assert worst[0] <= limit.decoded
    assert worst[1] <= limit.original


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_has_a_line(variant, weight_format):
    assert (weight_format, act_kind(weight_format, variant)) in LIMITS


@pytest.mark.parametrize("weight_format", FORMATS)
def test_packed_weights_do_not_depend_on_the_variant(weight_format):
    shape = Shape(experts=2, top_k=1, hidden=100, intermediate=90)
    first, *others = [Case(shape, weight_format, variant=variant).decoded() for variant in RUNNABLE]
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("weight_format", ["int8", "int4", "int4g"])
@pytest.mark.parametrize("tokens", [1, 3, 48])
def test_integer_formats_give_the_same_bits_on_every_variant(weight_format, tokens):
    """Where the activations are the same: sums are exact per group, and the float steps agree.

    Tile products, which start above 8 rows, take the offset of the weights in another step and agree among themselves.
    """
    batch = random_batch(SHAPE, tokens)
    seen: dict = {}
    for variant in RUNNABLE:
        sums = Case(SHAPE, weight_format, variant=variant).sums(*batch)
        tiles = "amx" in variant and tokens > 8
        name, first = seen.setdefault((act_kind(weight_format, variant), tiles), (variant, sums))
        assert all(map(np.array_equal, sums, first)), f"{variant} differs from {name}"


def test_bf16_weights_are_kept_exactly():
    case = Case(Shape(experts=3, top_k=1, hidden=70, intermediate=130), threads=(1, 1))
    for original, decoded in zip(case.original, case.decoded(), strict=True):
        assert all(np.array_equal(from_bf16(a), b) for a, b in zip(original, decoded, strict=True))


@pytest.mark.parametrize(("weight_format", "steps"), [("int8", 254), ("int4", 14)])
def test_a_weight_is_off_by_half_a_step_of_its_row_at_most(weight_format, steps):
    case = Case(Shape(experts=1, top_k=1, hidden=200, intermediate=90), weight_format)
    for original, decoded in zip(case.original[0], case.decoded()[0], strict=True):
        weights = from_bf16(original)
        step = 2 * np.abs(weights).max(axis=1, keepdims=True) / steps
        assert (np.abs(weights - decoded) <= 0.51 * step + step / 32 * (weight_format == "int4")).all()
