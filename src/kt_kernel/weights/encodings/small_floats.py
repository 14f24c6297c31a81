"""What the codes of small floats mean, as f64: exact for all of them."""

import numpy as np


def _decode(code: int, exponent_bits: int, fraction_bits: int) -> float:
    """IEEE-like, without infinities: (-1)^s * 2^(e - bias) * 1.f, and 2^(1 - bias) * 0.f where e is 0."""
    fraction = code & ((1 << fraction_bits) - 1)
    exponent = code >> fraction_bits & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (fraction_bits + exponent_bits) else 1.0
    bias = (1 << (exponent_bits - 1)) - 1
    significand = fraction + (1 << fraction_bits if exponent else 0)
    return sign * significand * 2.0 ** (max(exponent, 1) - bias - fraction_bits)


def _table(bits: int, decode) -> np.ndarray:
    table = np.array([decode(code) for code in range(1 << bits)], np.float64)
    table.flags.writeable = False
    return table


E4M3_NAN = 0x7F  # of either sign
E8M0_NAN = 0xFF

E4M3 = _table(8, lambda code: float("nan") if code & 0x7F == E4M3_NAN else _decode(code, 4, 3))
E2M1 = _table(4, lambda code: _decode(code, 2, 1))
E8M0 = _table(8, lambda code: float("nan") if code == E8M0_NAN else 2.0 ** (code - 127))
