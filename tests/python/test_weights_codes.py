"""Codes go into layers as they are, and quantise gives the codes that load_expert would pack."""

import numpy as np
import pytest
from layer_reference import Case, Shape, from_bf16, random_batch, random_expert, shared_pool, to_bf16
from weight_files import decoded, make_layer, same

from kt_kernel import _core

CODED = ["int8", "int4", "int4g"]
ODD = Shape(experts=1, top_k=1, hidden=99, intermediate=261)  # rows and depths that are no multiple of anything
NODES = [(2,), (1, 2), (1, 1, 1), (1, 1, 1, 1)]


def unpack(codes: np.ndarray, depth: int) -> np.ndarray:
    """Codes of the layout `rows` as integers."""
    if codes.dtype == np.int8:
        return codes.astype(np.int32)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    return nibbles[:, :depth].astype(np.int32) - 8


def meaning(weight_format: str, coded: tuple, depth: int) -> np.ndarray:
    """scale * step * code in f32."""
    codes = unpack(coded[0], depth)
    steps = {"int8": 1, "int4": 16}.get(weight_format)
    if steps is None:
        steps = coded[2].astype(np.int32).repeat(64, axis=1)[:, :depth]
    return coded[1][:, None] * (steps * codes).astype(np.float32)


def random_codes(weight_format: str, rows: int, depth: int, rng) -> tuple:
    """Every value that a code may have, -128 and -8 included, which quantise does not use."""
    scales = rng.uniform(-0.1, 0.1, rows).astype(np.float32)
    if weight_format == "int8":
        return rng.integers(-128, 128, (rows, depth), np.int8), scales
    coded = rng.integers(0, 256, (rows, (depth + 1) // 2), np.uint8), scales
    if weight_format == "int4":
        return coded
    return *coded, rng.integers(1, 17, (rows, -(-depth // 64)), np.uint8)


@pytest.mark.parametrize("threads", NODES)
@pytest.mark.parametrize("weight_format", CODED)
def test_codes_and_scales_arrive_as_they_are_on_any_number_of_nodes(weight_format, threads):
    rng = np.random.default_rng(1)
    sizes = ((ODD.intermediate, ODD.hidden),) * 2 + ((ODD.hidden, ODD.intermediate),)
    coded = [random_codes(weight_format, *size, rng) for size in sizes]
    layer = make_layer(ODD, weight_format, threads)
    layer.load_codes(0, *([part] for part in coded))
    assert layer.loaded_experts == 1
    expected = tuple(meaning(weight_format, part, size[1]) for part, size in zip(coded, sizes, strict=True))
    assert same(decoded(layer), [expected])


@pytest.mark.parametrize("weight_format", CODED)
def test_quantised_and_loaded_is_the_same_as_loaded(weight_format):
    """To the bit of every weight and of an output."""
    shape = Shape(experts=3, top_k=2, hidden=99, intermediate=131)
    case = Case(shape, weight_format)
    x, ids, weights = random_batch(shape, 5)
    before, expected = case.decoded(), case.sums(x, ids, weights)
    for expert, matrices in enumerate(case.original):
        case.layer.load_expert(expert, *random_expert(shape, 5, expert))
        coded = [_core.quantise(case.pool, weight_format, matrix) for matrix in matrices]
        case.layer.load_codes(expert, *([part] for part in coded))
    assert same(case.decoded(), before)
    assert all(np.array_equal(a, b) for a, b in zip(case.sums(x, ids, weights), expected, strict=True))


@pytest.mark.parametrize("threads", [(1,), (3,), (1, 2)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (16, 64), (17, 65), (100, 257)])
@pytest.mark.parametrize("weight_format", CODED)
def test_quantise_follows_its_formula(weight_format, shape, threads):
    rng = np.random.default_rng(2)
    matrix = to_bf16(rng.standard_normal(shape))
    matrix[0, :3] = 0
    coded = _core.quantise(shared_pool(threads), weight_format, matrix)
    values = from_bf16(matrix)
    largest = np.abs(values).max(axis=1)
    d = largest / np.float32({"int8": 127, "int4": 112, "int4g": 120}[weight_format])
    assert np.array_equal(coded[1], d)
    codes = unpack(coded[0], shape[1])
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d > 0)
    rounded = np.rint(values * inverse[:, None]).astype(np.int32)
    if weight_format == "int8":
        assert np.array_equal(codes, rounded)
    elif weight_format == "int4":
        assert np.array_equal(codes, np.sign(rounded) * ((np.abs(rounded) + 8) >> 4))
    else:
        assert coded[2].shape == (shape[0], -(-shape[1] // 64))
        steps = coded[2].repeat(64, axis=1)[:, : shape[1]]
        assert steps.min() >= 1
        assert steps.max() <= 16
        error = np.abs(meaning(weight_format, coded, shape[1]) - values)
        assert (error <= 2 * steps * d[:, None]).all()  # half a step, or more for an extreme that others outvoted
    if weight_format != "int8" and shape[1] % 2:
        assert (coded[0][:, -1] >> 4 == 8).all()  # the nibble that stands for nothing is a 0


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("weight_format", CODED)
def test_a_pool_is_not_needed_and_changes_nothing(weight_format, search):
    matrix = to_bf16(np.random.default_rng(4).standard_normal((100, 257)))
    alone = _core.quantise(None, weight_format, matrix, search=search)
    for threads in ((1,), (3,), (1, 2)):
        together = _core.quantise(shared_pool(threads), weight_format, matrix, search=search)
        assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (17, 65), (20, 1000)])
@pytest.mark.parametrize("weight_format", CODED)
def test_searched_scales_err_less_and_the_error_is_what_it_says(weight_format, shape):
    matrix = to_bf16(np.random.default_rng(5).standard_normal(shape))
    exact = from_bf16(matrix).astype(np.float64)
    found = []
    for search in (False, True):
        coded = _core.quantise(None, weight_format, matrix, search=search)
        error, weight = _core.squared_error(weight_format, matrix, coded)
        squares = (meaning(weight_format, coded, shape[1]) - exact) ** 2
        found.append((squares * np.abs(exact) ** (0.5 if weight_format == "int4g" else 1)).sum())
        assert error == pytest.approx(squares.sum(), rel=1e-4, abs=1e-12)
        assert weight == pytest.approx((exact**2).sum(), rel=1e-5)
    assert found[1] <= found[0] * 1.01 + 1e-12  # the root of int4g is within 6 %


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F80, 0xFF80])
@pytest.mark.parametrize("weight_format", CODED)
def test_the_error_of_what_is_no_number_is_none(weight_format, bits):
    matrix = to_bf16(np.random.default_rng(6).standard_normal((5, 70)))
    matrix[3, 66] = bits
    error, weight = _core.squared_error(weight_format, matrix, _core.quantise(None, weight_format, matrix, search=True))
    assert not np.isfinite(error + weight)


@pytest.mark.parametrize("weight_format", CODED)
def test_torch_and_strided_matrices_are_quantised_alike(weight_format):
    torch = pytest.importorskip("torch")
    matrix = random_expert(ODD, 0, 0)[0]
    pool = shared_pool((1,))
    expected = _core.quantise(pool, weight_format, matrix)
    tensor = torch.from_numpy(matrix.view(np.int16)).view(torch.bfloat16)
    for other in (tensor, np.asfortranarray(matrix)):
        assert all(
            np.array_equal(a, b) for a, b in zip(_core.quantise(pool, weight_format, other), expected, strict=True)
        )


def test_what_quantise_refuses():
    pool, matrix = shared_pool((1,)), np.zeros((4, 8), np.uint16)
    with pytest.raises(ValueError, match="'int3' is unknown; the formats are"):
        _core.quantise(pool, "int3", matrix)
    with pytest.raises(ValueError, match="bf16 are not quantised"):
        _core.quantise(pool, "bf16", matrix)
    with pytest.raises(TypeError, match="must hold bf16"):
        _core.quantise(pool, "int8", matrix.astype(np.float32))
    for shape in ((8,), (0, 4), (2, 2, 2)):
        with pytest.raises(ValueError, match="needs a matrix; this array has shape"):
            _core.quantise(pool, "int8", np.zeros(shape, np.uint16))


def parts(weight_format="int8", rows=((64, 64), (64, 64), (64, 64)), count=1) -> list[list[tuple]]:
    rng = np.random.default_rng(3)
    return [[random_codes(weight_format, *size, rng)] * count for size in rows]


SQUARE = Shape(experts=2, top_k=1, hidden=64, intermediate=64)


def test_what_load_codes_refuses():
    layer = make_layer(SQUARE, "int8")
    good = parts()
    layer.load_codes(1, *good)
    with pytest.raises(ValueError, match=r"expert 2 is not in 0\.\.1"):
        layer.load_codes(2, *good)
    with pytest.raises(ValueError, match="takes no codes of a layout 'columns'; layouts are rows and blocks"):
        layer.load_codes(0, *good, layout="columns")
    with pytest.raises(ValueError, match="a layer of bf16 takes no codes"):
        make_layer(SQUARE, "bf16").load_codes(0, *good)
    with pytest.raises(ValueError, match="'rows' are not cut"):
        layer.load_codes(0, *parts(count=2))
    with pytest.raises(ValueError, match="equally many parts, at least one"):
        layer.load_codes(0, [], [], [])
    with pytest.raises(ValueError, match="equally many parts"):
        layer.load_codes(0, good[0], good[1], [])
    with pytest.raises(ValueError, match=r"up must be a list of \(codes, scales\)"):
        layer.load_codes(0, good[0], [good[1][0][:1]], good[2])
    with pytest.raises(ValueError, match=r"gate must be a list of \(codes, scales, steps\)"):
        make_layer(SQUARE, "int4g").load_codes(0, *parts("int4"))
    with pytest.raises(ValueError, match="cannot take codes of the layout 'blocks'"):
        make_layer(SQUARE, "int4g").load_codes(0, *parts("int4g"), layout="blocks")


@pytest.mark.parametrize("weight_format", CODED)
def test_codes_of_another_shape_or_type(weight_format):
    layer = make_layer(SQUARE, weight_format)
    good = parts(weight_format)
    for position, name in enumerate(("codes", "scales", "steps")[: len(good[0][0])]):
        wrong = list(good[2][0])
        wrong[position] = wrong[position][:-1]
        with pytest.raises(ValueError, match=rf"{name} of down has shape \[.*\]; this layer needs \[64"):
            layer.load_codes(0, good[0], good[1], [wrong])
        wrong[position] = good[2][0][position].astype(np.float64)
        with pytest.raises(TypeError, match=f"{name} of down must hold "):
            layer.load_codes(0, good[0], good[1], [wrong])


@pytest.mark.parametrize("step", [0, 17, 255])
def test_a_step_out_of_range_is_found_before_anything_is_packed(step):
    layer = make_layer(SQUARE, "int4g")
    good = parts("int4g")
    layer.load_codes(0, *good)
    before = decoded(layer)
    bad = parts("int4g")
    bad[2][0][2][63, 0] = step
    with pytest.raises(ValueError, match=rf"a step of down is {step}; steps are 1\.\.16"):
        layer.load_codes(0, bad[1], bad[0], bad[2])
    assert same(decoded(layer), before)


def test_a_layer_tells_what_it_is():
    pool = shared_pool((1, 1))
    layer = make_layer(Shape(3, 2, 70, 130), "int4g", (1, 1))
    assert (layer.format, layer.num_experts, layer.hidden_size, layer.intermediate_size) == ("int4g", 3, 70, 130)
    assert layer.pool is pool
