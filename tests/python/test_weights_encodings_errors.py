"""Encoded matrices that cannot be read: the file, the tensor, what was found and what is needed are named."""

import re
from functools import partial

import encoded_weights as made
import numpy as np
import pytest
from layer_reference import Shape, shared_pool
from weight_files import make_layer, write_safetensors

from kt_kernel.weights import MissingTensorError, choose_format, find_method, load_layer, save_layer

SHAPE = Shape(experts=2, top_k=1, hidden=256, intermediate=384)
STEM = "model.layers.7.mlp.experts.1.up_proj"  # [384, 256]


def load_changed(folder, encode, changes, shape=SHAPE, keep=False):
    """changes: suffix of STEM -> (dtype, array), a function of the array, or None, which removes it.

    Into a layer of bf16, or into one that keeps codes as the first expert has them, with no expert in it.
    """
    tensors, dtypes, _ = made.make_layer_tensors(encode, shape)
    for suffix, change in changes.items():
        name = f"{STEM}.{suffix}"
        if change is None:
            del tensors[name]
        elif callable(change):
            tensors[name] = change(tensors[name].copy())
        else:
            dtypes[name], tensors[name] = change
    write_safetensors(folder / "model.safetensors", tensors, dtypes=dtypes)
    if not keep:
        load_layer(make_layer(shape, "bf16"), "BF16", folder, 7)
        return
    method = find_method(folder, 7, shape.hidden, shape.intermediate)
    found = choose_format(method, folder, 7, shape.hidden, shape.intermediate)
    layer = make_layer(shape, found.format, group=found.group)
    try:
        load_layer(layer, method, folder, 7)
    finally:
        assert layer.loaded_experts <= 1  # the first one is good; the second is not half there


def put(value, *at):
    def change(array):
        array[at or tuple(size - 1 for size in array.shape)] = value
        return array

    return change


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


F32 = "F32"
CASES = {
    "fp8 NaN": (made.fp8_block, {"weight": put(0x7F)}, "weight", "codes that mean NaN (0x7F); needed are finite"),
    "fp8 -NaN": (made.fp8_block, {"weight": put(0xFF)}, "weight", "codes that mean NaN"),
    "fp8 channel NaN": (made.fp8_channel, {"weight": put(0xFF, 0, 0)}, "weight", "codes that mean NaN"),
    "fp8 blocks": (
        made.fp8_block,
        {"weight_scale_inv": (F32, zeros(5, 2))},
        "weight_scale_inv",
        "is F32 [5, 2]; needed is ceil(384 / b) for a block size b, a power of two, in dimension 0 (128: 3)",
    ),
    "fp8 no blocks": (made.fp8_block, {"weight_scale_inv": (F32, zeros(3, 0))}, "weight_scale_inv", "in dimension 1"),
    "fp8 flat": (
        made.fp8_block,
        {"weight_scale_inv": (F32, zeros(384))},
        "weight_scale_inv",
        "is F32 [384]; needed is a matrix of scales",
    ),
    "fp8 scale NaN": (
        made.fp8_block,
        {"weight_scale_inv": put(np.nan)},
        "weight_scale_inv",
        "has a scale of nan; needed are finite scales",
    ),
    "fp8 scale inf": (made.fp8_channel, {"weight_scale": put(np.inf)}, "weight_scale", "has a scale of inf"),
    "fp8 scale large": (made.fp8_channel, {"weight_scale": put(1e36)}, "weight_scale", "has a scale of 1e+36"),
    "fp8 channel length": (
        made.fp8_channel,
        {"weight_scale": (F32, zeros(256))},
        "weight_scale",
        "is F32 [256]; needed is [384] or [384, 1], one scale for all",
    ),
    "fp8 weight shape": (
        made.fp8_block,
        {"weight": lambda array: array[:-1].copy()},
        "weight",
        "is F8_E4M3 [383, 256]; needed is [384, 256]",
    ),
    "fp8 without scale": (
        made.fp8_block,
        {"weight_scale_inv": None},
        "weight",
        "is in no known encoding: found are weight F8_E4M3 [384, 256]; needed is one of MXFP8: weight F8_E4M3, "
        "weight_scale_inv U8/F8_E8M0; FP8 block: ",
    ),
    "e5m2": (
        made.fp8_block,
        {"weight": ("F8_E5M2", zeros(384, 256, dtype=np.uint8))},
        "weight",
        "found are weight F8_E5M2 [384, 256], weight_scale_inv F32 [3, 2]; e5m2 is not supported; needed is one of",
    ),
    "fp8 integer scales": (
        made.fp8_channel,
        {"weight_scale": ("I32", zeros(384, dtype=np.int32))},
        "weight",
        "weight_scale I32 [384]; needed is one of",
    ),
    "mxfp8 NaN": (made.mxfp8, {"weight": put(0x7F)}, "weight", "codes that mean NaN (0x7F)"),
    "mxfp8 scale NaN": (made.mxfp8, {"weight_scale_inv": put(255)}, "weight_scale_inv", "codes that mean NaN (0xFF)"),
    "mxfp8 scale large": (made.mxfp8, {"weight_scale_inv": put(247)}, "weight_scale_inv", "has a scale of 1.329e+36"),
    "mxfp8 scale shape": (
        made.mxfp8,
        {"weight_scale_inv": ("U8", zeros(3, 2, dtype=np.uint8))},
        "weight_scale_inv",
        "is U8 [3, 2]; needed is [384, 8]",
    ),
    "mxfp4 scale NaN": (made.mxfp4, {"scale": put(255)}, "scale", "codes that mean NaN (0xFF)"),
    "mxfp4 scale shape": (
        made.mxfp4,
        {"scale": ("F8_E8M0", zeros(384, 16, dtype=np.uint8))},
        "scale",
        "is F8_E8M0 [384, 16]; needed is [384, 8]",
    ),
    "mxfp4 weight shape": (
        made.mxfp4,
        {"weight": ("I8", zeros(384, 256, dtype=np.int8))},
        "weight",
        "is I8 [384, 256]; needed is [384, 128]",
    ),
    "nvfp4 scale NaN": (made.nvfp4, {"weight_scale": put(0x7F)}, "weight_scale", "codes that mean NaN (0x7F)"),
    "nvfp4 scale shape": (
        made.nvfp4,
        {"weight_scale": ("F8_E4M3", zeros(384, 8, dtype=np.uint8))},
        "weight_scale",
        "is F8_E4M3 [384, 8]; needed is [384, 16]",
    ),
    "nvfp4 global shape": (
        made.nvfp4,
        {"weight_scale_2": (F32, zeros(2))},
        "weight_scale_2",
        "is F32 [2]; needed is [] or [1]",
    ),
    "nvfp4 global NaN": (
        made.nvfp4,
        {"weight_scale_2": (F32, np.float32([np.nan]))},
        "weight_scale_2",
        "is nan; needed is a finite scale",
    ),
    "nvfp4 global large": (
        made.nvfp4,
        {"weight_scale_2": (F32, np.float32([1e38])), "weight_scale": put(0x7E)},
        "weight_scale",
        "has a scale of 4.48e+40",
    ),
    "nvfp4 without global": (
        made.nvfp4,
        {"weight_scale_2": None},
        "weight",
        "needed is one of NVFP4: weight U8/I8, weight_scale F8_E4M3, weight_scale_2 F32; MXFP4",
    ),
    "nvfp4 smoothed": (
        made.nvfp4,
        {"pre_quant_scale": ("BF16", zeros(256, dtype=np.uint16))},
        "pre_quant_scale",
        "is there; needed is NVFP4 without it",
    ),
    "rawint4 groups": (
        made.rawint4,
        {"weight_scale": ("F16", zeros(384, 7, dtype=np.float16))},
        "weight_scale",
        "is F16 [384, 7]; needed is ceil(256 / g) groups in dimension 1",
    ),
    "rawint4 no groups": (made.rawint4, {"weight_scale": (F32, zeros(384, 0))}, "weight_scale", "in dimension 1"),
    "rawint4 scale rows": (
        made.rawint4,
        {"weight_scale": (F32, zeros(256, 8))},
        "weight_scale",
        "is F32 [256, 8]; needed is [384, groups of the 256 columns]",
    ),
    "rawint4 bits": (
        made.rawint4,
        {"weight_packed": ("I32", zeros(384, 64, dtype=np.int32))},
        "weight_packed",
        "is I32 [384, 64]; needed is [384, 32]",
    ),
    "rawint4 shape": (
        made.rawint4,
        {"weight_shape": ("I64", np.int64([256, 384]))},
        "weight_shape",
        "says [256, 384]; needed is [384, 256]",
    ),
    "rawint4 shape's shape": (
        made.rawint4,
        {"weight_shape": ("I64", np.int64([384]))},
        "weight_shape",
        "needed is [2]",
    ),
    "rawint4 zeros": (
        made.rawint4,
        {"weight_zero_point": ("I32", zeros(48, 8, dtype=np.int32))},
        "weight_zero_point",
        "is there; needed is RAWINT4 without it",
    ),
    "rawint4 scale NaN": (made.rawint4, {"weight_scale": put(0x7FC0)}, "weight_scale", "has a scale of nan"),
    "gptq g_idx": (
        partial(made.gptq, order="random"),
        {"g_idx": put(8)},
        "g_idx",
        "has groups 0..8; needed are 0..7",
    ),
    "gptq g_idx length": (
        partial(made.gptq, order="random"),
        {"g_idx": ("I32", zeros(384, dtype=np.int32))},
        "g_idx",
        "is I32 [384]; needed is [256]",
    ),
    "gptq zeros": (
        made.gptq,
        {"qzeros": ("I32", zeros(8, 96, dtype=np.int32))},
        "qzeros",
        "is I32 [8, 96]; needed is [8, 48]",
    ),
    "gptq version 2": (
        made.gptq,
        {"qzeros": ("I32", np.full((8, 48), 0x88888888, np.uint32).view(np.int32))},
        "qzeros",
        "holds 8 everywhere; needed are zero points less one",
    ),
    "gptq 8 bits": (
        made.gptq,
        {"qweight": ("I32", zeros(64, 384, dtype=np.int32))},
        "qweight",
        "is I32 [64, 384]; needed is [32, 384]",
    ),
    "gptq groups": (
        made.gptq,
        {"scales": ("F16", zeros(7, 384, dtype=np.float16))},
        "scales",
        "needed is ceil(256 / g) groups in dimension 0",
    ),
    "neither gptq nor awq": (
        made.gptq,
        {"scales": ("F16", zeros(8, 100, dtype=np.float16))},
        "qweight",
        "found are qweight I32 [32, 384], scales F16 [8, 100], qzeros I32 [8, 48]; needed is one of AWQ: ",
    ),
    "awq depth": (
        made.awq,
        {"qweight": ("I32", zeros(128, 48, dtype=np.int32))},
        "qweight",
        "is I32 [128, 48]; needed is [256, 48]",
    ),
    "awq zeros": (
        made.awq,
        {"qzeros": ("I32", zeros(4, 48, dtype=np.int32))},
        "qzeros",
        "is I32 [4, 48]; needed is [8, 48]",
    ),
    "awq groups": (made.awq, {"scales": ("F16", zeros(7, 384, dtype=np.float16))}, "scales", "in dimension 0"),
    "awq scale inf": (made.awq, {"scales": put(np.inf)}, "scales", "has a scale of inf"),
}


_NAN_CODES, _LARGE = "codes mean NaN (0x7F) in places", "NaN, infinite, or 2^90 and more in places"
_GROUPS = "in dimension 1: this layer was made for groups of"
# What a layer that keeps codes says otherwise: the core looks at every code and scale while it packs them.
KEPT = {
    "fp8 NaN": _NAN_CODES,
    "fp8 -NaN": _NAN_CODES,
    "fp8 channel NaN": _NAN_CODES,
    "mxfp8 NaN": _NAN_CODES,
    "fp8 no blocks": f"is F32 [3, 0]; needed is 2 {_GROUPS} 128",
    "fp8 scale NaN": f"scales are {_LARGE}",
    "fp8 scale inf": f"factors of the rows are {_LARGE}",
    "fp8 scale large": f"factors of the rows are {_LARGE}",
    "mxfp8 scale NaN": f"scales are {_LARGE}",
    "mxfp8 scale large": f"scales are {_LARGE}",
    "mxfp4 scale NaN": f"scales are {_LARGE}",
    "nvfp4 scale NaN": "scales are negative or NaN in places",
    "nvfp4 global NaN": f"factors of the rows are {_LARGE}",
    "nvfp4 global large": f"factors of the rows are {_LARGE}",
    "rawint4 scale NaN": f"scales are {_LARGE}",
    "rawint4 groups": f"is F16 [384, 7]; needed is 8 {_GROUPS} 32",
    "rawint4 no groups": f"needed is 8 {_GROUPS} 32",
    "gptq groups": "is F16 [7, 384]; needed is 8 in dimension 0: this layer was made for groups of 32",
    "awq groups": "is F16 [7, 384]; needed is 8 in dimension 0: this layer was made for groups of 32",
    "awq scale inf": f"scales are {_LARGE}",
}


KEPT_TENSORS = {"nvfp4 global large": "weight_scale_2"}


@pytest.mark.parametrize(
    ("case", "keep"),
    [(case, keep) for case in CASES for keep in (False, True) if not (keep and case.startswith("gptq g_idx"))],
)
def test_the_tensor_and_what_is_needed_are_named(case, keep, tmp_path):
    encode, changes, suffix, message = CASES[case]
    if keep:
        suffix, message = KEPT_TENSORS.get(case, suffix), KEPT.get(case, message)
    with pytest.raises(ValueError, match=re.escape(f"model.safetensors: tensor '{STEM}.{suffix}'")) as caught:
        load_changed(tmp_path, encode, changes, keep=keep)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("encode", "shape", "suffix", "message"),
    [
        (partial(made.rawint4, group=64), Shape(2, 1, 192, 200), "weight_scale", "200 weights may have 50 or 64"),
        (partial(made.gptq, group=128, zeros="absent"), Shape(2, 1, 192, 256), "scales", "may have 96 or 128"),
        (partial(made.awq, group=128), Shape(2, 1, 192, 256), "scales", "may have 96 or 128"),
        (partial(made.gptq, zeros="absent"), Shape(2, 1, 256, 100), "qweight", "multiples of 8, not [256, 100]"),
        (partial(made.gptq, zeros="absent", order="plain"), Shape(2, 1, 100, 256), "qweight", "not [256, 100]"),
    ],
)
def test_shapes_that_are_ambiguous_or_not_packed(encode, shape, suffix, message, tmp_path):
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor '.*\.{suffix}'") as caught:
        load_changed(tmp_path, encode, {}, shape)
    assert message in str(caught.value)


def test_odd_columns_need_whole_bytes(tmp_path):
    with pytest.raises(ValueError, match=r"needed is an even number of columns, not 99"):
        load_changed(tmp_path, made.mxfp4, {}, Shape(2, 1, 99, 128))


@pytest.mark.parametrize("others", [(), ("weight_scale", "weight_shape")])
def test_a_matrix_that_is_missing(others, tmp_path):
    with pytest.raises(MissingTensorError, match=rf"no tensor '{STEM}\.weight_packed'; is the download"):
        load_changed(tmp_path, made.rawint4, dict.fromkeys(["weight_packed", *others]))


@pytest.mark.parametrize("encode", [made.fp8_block, made.mxfp4, made.rawint4], ids=["fp8_block", "mxfp4", "rawint4"])
def test_no_matrix(encode, tmp_path):
    tensors, dtypes, _ = made.make_layer_tensors(encode, SHAPE)
    tensors = {name: array.reshape(-1) for name, array in tensors.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.weight(_packed)?' is .*; needed is a matrix"):
        save_layer(shared_pool((1,)), "AMXINT8", tmp_path, 7, tmp_path / "out")
