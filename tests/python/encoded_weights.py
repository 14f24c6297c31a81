"""Matrices in the encodings of checkpoints, made element by element from the definitions, with what they mean.

Each function gives tensors (suffix -> (dtype, array)) and the exact meaning, f64 [N, K].
"""

from fractions import Fraction

import numpy as np

Tensors = dict[str, tuple[str, np.ndarray]]
Encoded = tuple[Tensors, np.ndarray]


def e4m3(code: int) -> Fraction | None:
    """OCP FP8 E4M3: bias 7, subnormals of 2^-9, no infinities, S.1111.111 is NaN."""
    sign, exponent, fraction = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        return None
    if exponent == 0:
        return sign * Fraction(fraction, 8) * Fraction(1, 2**6)
    return sign * (1 + Fraction(fraction, 8)) * Fraction(2) ** (exponent - 7)


def e2m1(code: int) -> Fraction:
    """OCP MX E2M1: bias 1, one subnormal, 0.5."""
    sign, exponent, fraction = (-1) ** (code >> 3), code >> 1 & 3, code & 1
    magnitude = Fraction(fraction, 2) if exponent == 0 else (1 + Fraction(fraction, 2)) * Fraction(2) ** (exponent - 1)
    return sign * magnitude


def e8m0(code: int) -> Fraction | None:
    return None if code == 255 else Fraction(2) ** (code - 127)


def _floats(values: list[Fraction | None]) -> np.ndarray:
    return np.array([np.nan if value is None else float(value) for value in values])


E4M3 = _floats([e4m3(code) for code in range(256)])
E2M1 = _floats([e2m1(code) for code in range(16)])
E8M0 = _floats([e8m0(code) for code in range(256)])


def nearest_bf16(values: np.ndarray) -> np.ndarray:
    """f64 -> the nearest bf16 value as f64, ties to even: 8 bits, and none below 2^-133."""
    _, exponent = np.frexp(values)
    exponent = np.maximum(exponent, -125) - 8
    return np.ldexp(np.rint(np.ldexp(values, -exponent)), exponent)


def random_e4m3(rng: np.random.Generator, shape: tuple[int, ...], first: int = 0) -> np.ndarray:
    """Every code that is a number, positive ones from `first` on if that is above 0."""
    codes = [code for code in range(256) if code & 0x7F != 0x7F and (first == 0 or first <= code < 0x80)]
    return rng.choice(np.array(codes, np.uint8), shape)


def random_scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """As stored, and as f64."""
    values = rng.uniform(1e-3, 4e-2, shape)
    if dtype == "F16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float64)
    f32 = values.astype(np.float32)
    if dtype == "F32":
        return f32, f32.astype(np.float64)
    bits = (f32.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def spread(scales: np.ndarray, shape: tuple[int, int], sizes: tuple[int, int]) -> np.ndarray:
    n, k = np.indices(shape)
    return scales[n // sizes[0], k // sizes[1]]


def fp8_block(rng, n, k, dtype="F32", block=(128, 128), suffix="weight_scale_inv") -> Encoded:
    codes = random_e4m3(rng, (n, k))
    stored, scales = random_scales(rng, (-(-n // block[0]), -(-k // block[1])), dtype)
    tensors = {"weight": ("F8_E4M3", codes), suffix: (dtype, stored)}
    return tensors, E4M3[codes] * spread(scales, (n, k), block)


def fp8_channel(rng, n, k, dtype="F32", ndim=1) -> Encoded:
    codes = random_e4m3(rng, (n, k))
    stored, scales = random_scales(rng, (n,), dtype)
    return {"weight": ("F8_E4M3", codes), "weight_scale": (dtype, stored.reshape(n, *[1] * (ndim - 1)))}, E4M3[
        codes
    ] * scales[:, None]


def fp8_tensor(rng, n, k, dtype="F32", shape=()) -> Encoded:
    codes = random_e4m3(rng, (n, k))
    stored, scale = random_scales(rng, shape, dtype)
    return {"weight": ("F8_E4M3", codes), "weight_scale": (dtype, np.asarray(stored))}, E4M3[codes] * np.max(scale)


def mxfp8(rng, n, k, dtype="U8") -> Encoded:
    codes = random_e4m3(rng, (n, k))
    scales = rng.integers(100, 140, (n, -(-k // 32)), np.uint8)
    tensors = {"weight": ("F8_E4M3", codes), "weight_scale_inv": (dtype, scales)}
    return tensors, E4M3[codes] * spread(E8M0[scales], (n, k), (1, 32))


def nibbles_of_rows(codes: np.ndarray, element_bytes: int = 1) -> np.ndarray:
    """[n, k] codes of 4 bits -> uint8, or int32 with k in ascending bits; the end is filled with zeros."""
    each = 2 * element_bytes
    n, k = codes.shape
    padded = np.zeros((n, -(-k // each) * each), np.uint64)
    padded[:, :k] = codes
    packed = sum(padded[:, i::each] << np.uint64(4 * i) for i in range(each))
    return packed.astype(np.uint8) if element_bytes == 1 else packed.astype(np.uint32).view(np.int32)


def mxfp4(rng, n, k, dtype="I8", scale_dtype="F8_E8M0") -> Encoded:
    codes = rng.integers(0, 16, (n, k))
    scales = rng.integers(100, 140, (n, -(-k // 32)), np.uint8)
    tensors = {"weight": (dtype, nibbles_of_rows(codes)), "scale": (scale_dtype, scales)}
    return tensors, E2M1[codes] * spread(E8M0[scales], (n, k), (1, 32))


def nvfp4(rng, n, k, ndim=0) -> Encoded:
    codes = rng.integers(0, 16, (n, k))
    scales = random_e4m3(rng, (n, -(-k // 16)), first=1)
    whole = np.float32(rng.uniform(1e-4, 1e-3))
    tensors = {
        "weight": ("U8", nibbles_of_rows(codes)),
        "weight_scale": ("F8_E4M3", scales),
        "weight_scale_2": ("F32", np.full([1] * ndim, whole)),
        "input_scale": ("F32", np.float32(3)[None]),  # of activations: nothing to us
    }
    return tensors, E2M1[codes] * spread(E4M3[scales], (n, k), (1, 16)) * np.float64(whole)


def rawint4(rng, n, k, dtype="BF16", group=32, element_bytes=4, with_shape=True) -> Encoded:
    codes = rng.integers(0, 16, (n, k))
    group = group or k
    stored, scales = random_scales(rng, (n, -(-k // group)), dtype)
    packed = nibbles_of_rows(codes, element_bytes)
    tensors = {"weight_packed": ("I32" if element_bytes == 4 else "U8", packed), "weight_scale": (dtype, stored)}
    if with_shape:
        tensors["weight_shape"] = ("I64", np.array([n, k], np.int64))
    return tensors, (codes - 8) * spread(scales, (n, k), (1, group))


def gptq(rng, n, k, dtype="F16", group=32, zeros="any", order="none") -> Encoded:
    """zeros: any, symmetric, absent, "version 2", "symmetric version 2"; g_idx: none (absent), plain, random,
    or shared: the same for all matrices of this depth.
    """
    codes, groups = rng.integers(0, 16, (n, k)), -(-k // group)
    stored, scales = random_scales(rng, (groups, n), dtype)
    less = 0 if "version 2" in zeros else 1
    even = "symmetric" in zeros or zeros == "absent"
    zero = np.full((groups, n), 8) if even else rng.integers(less, 16 + less, (groups, n))
    group_of = np.arange(k) // group
    if order in {"random", "shared"}:
        group_of = (rng if order == "random" else np.random.default_rng(k)).permutation(group_of)
    tensors = {
        "qweight": ("I32", np.ascontiguousarray(nibbles_of_rows(codes, 4).T)),
        "scales": (dtype, stored),
    }
    if zeros != "absent":
        tensors["qzeros"] = ("I32", nibbles_of_rows(zero - less, 4))
    if order != "none":
        tensors["g_idx"] = ("I32", group_of.astype(np.int32))
    return tensors, (codes - zero[group_of].T) * scales[group_of].T


def awq(rng, n, k, dtype="F16", group=32) -> Encoded:
    codes, groups = rng.integers(0, 16, (k, n)), -(-k // group)
    stored, scales = random_scales(rng, (groups, n), dtype)
    zero = rng.integers(0, 16, (groups, n))

    def packed(values: np.ndarray) -> np.ndarray:
        shuffled = values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape)
        return nibbles_of_rows(shuffled, 4)

    group_of = np.arange(k) // group
    tensors = {"qweight": ("I32", packed(codes)), "qzeros": ("I32", packed(zero)), "scales": (dtype, stored)}
    return tensors, ((codes - zero[group_of]) * scales[group_of]).T


MATRIX_NAMES = {
    "mlp": [f"mlp.experts.{{}}.{p}_proj" for p in ("gate", "up", "down")],
    "block_sparse_moe": [f"block_sparse_moe.experts.{{}}.{w}" for w in ("w1", "w3", "w2")],
    "ffn": [f"ffn.experts.{{}}.{w}" for w in ("w1", "w3", "w2")],
    "experts": [f"experts.{{}}.{w}" for w in ("w1", "w3", "w2")],
}


def make_layer_tensors(encode, shape, base="model.layers.7", naming="mlp", seed=0):
    """Tensors and dtypes for write_safetensors, and per expert the meaning of gate, up and down."""
    rng = np.random.default_rng(seed)
    tensors, dtypes, meaning = {}, {}, []
    sizes = ((shape.intermediate, shape.hidden),) * 2 + ((shape.hidden, shape.intermediate),)
    for expert in range(shape.experts):
        matrices = []
        for name, size in zip(MATRIX_NAMES[naming], sizes, strict=True):
            parts, exact = encode(rng, *size)
            matrices.append(exact)
            for suffix, (dtype, array) in parts.items():
                tensors[f"{base}.{name.format(expert)}.{suffix}"] = array
                dtypes[f"{base}.{name.format(expert)}.{suffix}"] = dtype
        meaning.append(tuple(matrices))
    return tensors, dtypes, meaning
