"""What every code of the small floats means, and how products with scales are rounded."""

import encoded_weights as made
import numpy as np
import pytest

from kt_kernel.weights.encodings import small_floats
from kt_kernel.weights.encodings.lookup import pairs, products
from kt_kernel.weights.floats import round_finite, round_once, to_f32


def values_of(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize(
    ("name", "definition"), [("E4M3", made.e4m3), ("E2M1", made.e2m1), ("E8M0", made.e8m0)], ids=lambda x: str(x)[:4]
)
def test_every_code_has_the_value_of_its_definition(name, definition):
    table = getattr(small_floats, name)
    assert len(table) == (16 if name == "E2M1" else 256)
    for code, value in enumerate(table):
        exact = definition(code)
        assert np.isnan(value) if exact is None else value == exact
        if exact == 0:
            assert np.signbit(value) == (code != 0)


@pytest.mark.parametrize(("name", "type_name"), [("E4M3", "float8_e4m3fn"), ("E8M0", "float8_e8m0fnu")])
def test_every_code_is_what_torch_reads(name, type_name):
    torch = pytest.importorskip("torch")
    if not hasattr(torch, type_name):
        pytest.skip(f"this torch has no {type_name}")
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, type_name))
    np.testing.assert_array_equal(getattr(small_floats, name), codes.to(torch.float64).numpy())


def test_rounding_is_to_nearest_even_once():
    rng = np.random.default_rng(0)
    ties = 1 + np.arange(64) / 128 + 1 / 256
    near = np.concatenate([ties, ties * (1 + 2.0**-40), ties * (1 - 2.0**-40)])  # f32 would make ties of these
    wide = rng.standard_normal(4096) * 2.0 ** rng.integers(-160, 127, 4096)
    values = np.concatenate([near, -near, wide, [0.0, -0.0, 2.0**-133, 2.0**-134, 3 * 2.0**-134, 2.0**-300]])
    rounded = values_of(round_once(values))
    np.testing.assert_array_equal(rounded, made.nearest_bf16(values))
    np.testing.assert_array_equal(np.signbit(rounded), np.signbit(values))
    f32 = values.astype(np.float32)
    np.testing.assert_array_equal(values_of(round_finite(f32.copy())), made.nearest_bf16(f32.astype(np.float64)))


def test_scales_become_f32_exactly():
    bits = np.arange(65536, dtype=np.uint16)
    finite = bits[(bits & 0x7F80) != 0x7F80]
    np.testing.assert_array_equal(to_f32(finite), values_of(finite))
    np.testing.assert_array_equal(to_f32(np.float16([0.1, 65504])), np.float32(np.float16([0.1, 65504])))


@pytest.mark.parametrize("table", [small_floats.E4M3, small_floats.E2M1], ids=["E4M3", "E2M1"])
def test_products_are_rounded_once(table):
    scales = np.random.default_rng(1).uniform(1e-6, 1e3, 500).astype(np.float32)
    exact = scales.astype(np.float64)[:, None] * np.nan_to_num(table)
    np.testing.assert_array_equal(values_of(products(scales, table)), made.nearest_bf16(exact))


def test_pairs_have_the_low_nibble_first():
    table = np.arange(16, dtype=np.uint16) * 11
    both = pairs(table).view(np.uint16).reshape(256, 2)
    assert [tuple(row) for row in both] == [(table[byte % 16], table[byte // 16]) for byte in range(256)]
