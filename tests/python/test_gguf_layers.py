"""Layers of every ggml type: the weights of the package gguf to the bit, and the forward pass against fp64."""

import os
import re
from functools import lru_cache

import numpy as np
import pytest
from gguf_cases import LAYER, TYPES, Experts, write_gguf
from layer_limits import RUNNABLE, act_kind
from layer_reference import (
    ACT_ERROR,
    SILU,
    Activation,
    Shape,
    from_bf16,
    moe_with_bound,
    random_batch,
    random_biases,
    shared_pool,
)
from wrapper_cases import batch, make

import kt_kernel
from kt_kernel import _core
from kt_kernel.ggml_types import EXPERT_FORMATS
from kt_kernel.weights import load_layer

TOP_K = 2
MIXED = [
    ("q4_k", "q4_k", "q6_k"),  # Q4_K_M
    ("q2_k", "q3_k", "q5_k"),
    ("q4_0", "q5_1", "q8_0"),
    ("iq2_xxs", "iq2_xs", "iq3_s"),
    ("iq1_s", "iq1_m", "iq4_xs"),
    ("f16", "bf16", "f32"),
    ("mxfp4", "q8_0", "iq4_nl"),
    ("q8_0", "q8_0", "mxfp4"),
    ("tq1_0", "tq2_0", "q6_k"),
]
EVERY = [*TYPES, *MIXED]
SCALED = [name for name, (_, kind) in TYPES.items() if kind.block > 1 and name != "mxfp4"]
# bytes of an f16 scale in a block, as in gguf_cases.py; the first of several
SCALE_AT = {"q2_k": 80, "q3_k": 108, "q6_k": 208, "tq1_0": 52, "tq2_0": 64}


def name_of(types) -> str:
    return types if isinstance(types, str) else "-".join(types)


def shape_for(types, experts: int = 3) -> Shape:
    """Of blocks of 32 one that no other size divides; of 256 one with several blocks, which nodes cut."""
    largest = max(TYPES[name][1].block for name in ([types] if isinstance(types, str) else types))
    return Shape(experts, TOP_K, 160, 224) if largest <= 32 else Shape(experts, TOP_K, 256, 512)


@lru_cache(maxsize=256)  # the package needs longer for the smallest types than any test
def known(shape: Shape, types, seed: int = 0) -> tuple[Experts, list]:
    """Experts, and what the package decodes them to. Not to be changed."""
    experts = Experts(shape, types, seed)
    return experts, [experts.decoded(expert) for expert in range(shape.experts)]


def make_layer(
    experts: Experts, threads=(1,), variant=None, activation=SILU, biases=False, max_tokens=64
) -> "_core.MoELayer":
    shape = experts.shape
    return _core.MoELayer(
        shared_pool(threads),
        format=experts.format,
        num_experts=shape.experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        max_tokens=max_tokens,
        variant=variant,
        swiglu_limit=activation.limit,
        swiglu_alpha=activation.alpha,
        activation=activation.name,
        biases=biases,
        group_size=32 if experts.format == "mxfp4" else 0,
    )


def filled(experts: Experts, **options) -> "_core.MoELayer":
    layer = make_layer(experts, **options)
    for expert in range(experts.shape.experts):
        layer.load_gguf(expert, *experts.expert(expert))
    return layer


def run(layer, x, ids, weights) -> np.ndarray:
    ids, out = ids.astype(np.int64), np.full_like(x, 0x7FC0)
    layer.forward(len(x), *(array.ctypes.data for array in (ids, weights, x, out)))
    return out


def assert_right(
    layer, decoded, tokens: int, variant=None, activation=SILU, biases=None, seed: int = 0, rows=None
) -> None:
    """``rows``: how many of the tokens each expert gets, instead of a random choice."""
    shape = Shape(layer.num_experts, TOP_K, layer.hidden_size, layer.intermediate_size)
    x, ids, weights = random_batch(shape, tokens, seed)
    if rows:
        ids[:] = -1
        places = np.random.default_rng(seed).permuted(np.arange(ids.size))[: sum(rows)]
        ids.flat[places] = np.repeat(np.arange(len(rows)), rows)
    kinds = {act_kind(part, variant or kt_kernel.__cpu_variant__) for part in layer.format.split("/")}
    act_error = max(ACT_ERROR[kind] for kind in kinds)
    exact, bound = moe_with_bound(
        decoded, from_bf16(x), ids, weights, act_error=act_error, activation=activation, biases=biases
    )
    errors = np.abs(from_bf16(run(layer, x, ids, weights)).astype(np.float64) - exact)
    assert (errors <= bound).all(), f"error {errors.max()} where {bound.flat[errors.argmax()]} is the limit"


def same(left, right) -> bool:
    """To the last bit, but for the sign of zeros: e2m1 has two, the package one."""
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_core_has_every_type():
    assert set(_core.formats()) >= EXPERT_FORMATS


@pytest.mark.parametrize("threads", [(1,), (1, 1)], ids=str)
@pytest.mark.parametrize("types", EVERY, ids=name_of)
def test_weights_are_those_of_the_package(types, threads):
    experts, decoded = known(shape_for(types), types)
    layer = filled(experts, threads=threads)
    assert layer.format == experts.format
    for expert in range(experts.shape.experts):
        assert same(layer.decode_expert(expert), decoded[expert])


@pytest.mark.parametrize("threads", [(1,), (2,), (1, 1)], ids=str)
@pytest.mark.parametrize("types", EVERY, ids=name_of)
def test_forward(types, threads):
    experts, decoded = known(shape_for(types), types)
    layer = filled(experts, threads=threads)
    for tokens in (1, 2, 5, 40):
        assert_right(layer, decoded, tokens)


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("name", TYPES)
def test_every_instruction_set(name, variant):
    shape = Shape(2, TOP_K, 64, 96) if TYPES[name][1].block <= 32 else Shape(2, TOP_K, 256, 256)
    experts, decoded = known(shape, name)
    layer = filled(experts, variant=variant)
    for tokens in (1, 20):
        assert_right(layer, decoded, tokens, variant)


@pytest.mark.parametrize("variant", [kt_kernel.__cpu_variant__, "amx" if "amx" in RUNNABLE else "emu_amx"])
@pytest.mark.parametrize("rows", [(1, 3, 40), (4, 5, 0), (258, 2, 20), (268, 24, 2), (8, 3, 150)], ids=str)
@pytest.mark.parametrize("types", ["q8_0", ("q4_k", "q4_k", "q6_k"), ("q4_0", "q5_1", "mxfp4")], ids=name_of)
def test_kernels_for_few_and_for_many_rows_meet_in_a_call(types, rows, variant):
    """Of 258 and 268 rows the last are a call of their own, whose rows are not gathered on tiles.

    With 280 the few are not gathered either, and 8 are too few among so many tokens to be gathered for tiles.
    """
    experts, decoded = known(shape_for(types), types)
    layer = filled(experts, threads=(2,), max_tokens=200, variant=variant)
    assert_right(layer, decoded, sum(rows) * 2 // 3, variant, rows=rows)


@pytest.mark.parametrize("types", ["q4_k", "q8_0", ("q4_k", "q4_k", "q6_k")], ids=name_of)
def test_the_number_of_threads_changes_no_bit(types):
    experts, _ = known(shape_for(types), types)
    outputs = []
    for threads in ((1,), (2,), (3,)):
        x, ids, weights = random_batch(experts.shape, 33)
        outputs.append(run(filled(experts, threads=threads), x, ids, weights))
    assert np.array_equal(outputs[0], outputs[1])
    assert np.array_equal(outputs[0], outputs[2])


@pytest.mark.parametrize("name", TYPES)
def test_a_layer_takes_as_much_memory_as_the_file(name):
    """5 % more at most, at the sizes of a model."""
    shape = Shape(1, 1, 2048, 768)
    layer = make_layer(Experts(shape, name))
    kind = TYPES[name][1]
    assert layer.packed_bytes_per_expert <= 1.05 * 3 * shape.hidden * shape.intermediate * kind.bytes / kind.block


@pytest.mark.parametrize("name", ["mxfp4", "q4_k"])
def test_biases_and_other_activations(name):
    shape = shape_for(name)
    (experts, decoded), biases = known(shape, name), random_biases(shape)
    for activation in (Activation(7.0, 1.702, "swigluoai"), Activation(limit=0.5)):
        layer = filled(experts, activation=activation, biases=True)
        for expert, bias in enumerate(biases):
            layer.load_biases(expert, *bias)
        assert_right(layer, decoded, 7, activation=activation, biases=biases)


class TestFiles:
    @pytest.mark.parametrize("threads", [(1,), (1, 1)], ids=str)
    @pytest.mark.parametrize("naming", ["packed", "each"])
    @pytest.mark.parametrize("types", [("q4_k", "q4_k", "q6_k"), "q5_0"], ids=name_of)
    def test_map_and_skip(self, types, naming, threads, tmp_path):
        """Permuted, one expert twice, one slot left out: slots have the experts that the map says."""
        experts, decoded = known(shape_for(types, experts=5), types)
        path = write_gguf(tmp_path / "model.gguf", experts.tensors(naming))
        logical, skip = [3, 0, 3, 4, 1], [False, False, False, True, False]
        layer = make_layer(experts, threads)
        load_layer(layer, "LLAMAFILE", path, LAYER, logical, skip)
        assert layer.loaded_experts == 4
        for slot, expert in enumerate(logical):
            if not skip[slot]:
                assert same(layer.decode_expert(slot), decoded[expert])
        load_layer(layer, "LLAMAFILE", path, LAYER, logical)
        assert_right(layer, [decoded[expert] for expert in logical], 9)

    def test_joined(self, tmp_path):
        experts, decoded = known(shape_for("q4_k"), "q4_k")
        layer = make_layer(experts)
        load_layer(layer, "LLAMAFILE", write_gguf(tmp_path / "model.gguf", experts.tensors("joined")), LAYER)
        assert_right(layer, decoded, 6)

    @pytest.mark.parametrize("types", [("q4_k", "q4_k", "q6_k"), "q8_0"], ids=name_of)
    def test_the_store(self, types, tmp_path):
        """The second load takes what was kept; a file that changed is packed again."""
        experts, others = Experts(shape_for(types), types), Experts(shape_for(types), types, seed=1)
        path, store = tmp_path / "model.gguf", tmp_path / "store"
        write_gguf(path, experts.tensors())
        status = os.stat(path)

        def load():
            layer = make_layer(experts)
            load_layer(layer, "LLAMAFILE", path, LAYER, store=store)
            return layer

        def has(layer, source) -> bool:
            return same(layer.decode_expert(1), source.decoded(1))

        assert has(load(), experts)
        kept = f"model.gguf.layer-00003.{experts.format.replace('/', '-')}.ktpack"
        assert [file.name for file in store.iterdir()] == [kept]
        write_gguf(path, others.tensors())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # the same header, size and time
        assert has(load(), experts)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert has(load(), others)
        assert has(load(), others)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("projection", ["gate", "up", "down"])
    def test_scales_that_are_not_finite(self, projection, value, tmp_path):
        for name in SCALED:
            experts = Experts(shape_for(name, experts=2), name)
            blocks = experts.data[("gate", "up", "down").index(projection)][1].reshape(-1, TYPES[name][1].bytes)
            bits = int(np.array(value, np.float16).view(np.uint16))
            if name == "iq1_m":
                words = blocks[-1, 48:56].view(np.uint16)
                words[:] = [int(word) & 0x0FFF | (bits >> 4 * i & 15) << 12 for i, word in enumerate(words)]
            else:
                at = SCALE_AT.get(name, 0)
                blocks[-1, at : at + 2] = np.array([bits], np.uint16).view(np.uint8)
            path = write_gguf(tmp_path / f"{name}.gguf", experts.tensors())
            where = re.escape(f"{path}: tensor 'blk.{LAYER}.ffn_{projection}_exps.weight' (expert 1): scales ")
            with pytest.raises(ValueError, match=where):
                load_layer(make_layer(experts), "LLAMAFILE", path, LAYER)


class TestWrapper:
    @pytest.mark.parametrize("method", ["LLAMAFILE", "auto"])
    @pytest.mark.parametrize("types", ["q8_0", ("q4_k", "q5_k", "q6_k"), "mxfp4"], ids=name_of)
    def test_forward(self, types, method, tmp_path):
        experts, decoded = known(shape_for(types), types)
        write_gguf(tmp_path / "model.gguf", experts.tensors())
        wrapper = make(experts.shape, method, layer_idx=LAYER, weight_path=tmp_path)
        assert wrapper.method == "LLAMAFILE"
        logical = [2, 0, 1]
        wrapper.load_weights(logical)
        assert wrapper.moe.format == experts.format
        x, ids, weights = batch(experts.shape, 6)
        kinds = {act_kind(part, kt_kernel.__cpu_variant__) for part in experts.format.split("/")}
        exact, bound = moe_with_bound(
            [decoded[expert] for expert in logical],
            x.double().numpy(),
            ids.numpy(),
            weights.numpy(),
            act_error=max(ACT_ERROR[kind] for kind in kinds),
        )
        assert (np.abs(wrapper.forward(x, ids, weights).double().numpy() - exact) <= bound).all()

    def test_gpt_oss(self, tmp_path):
        shape = shape_for("mxfp4")
        (experts, decoded), biases = known(shape, "mxfp4"), random_biases(shape)
        extra = {
            f"blk.{LAYER}.ffn_{name}_exps.bias": np.stack([bias[index] for bias in biases])
            for index, name in enumerate(("gate", "up", "down"))
        }
        write_gguf(tmp_path / "model.gguf", experts.tensors() | extra, "gpt-oss")
        wrapper = make(shape, "auto", layer_idx=LAYER, weight_path=tmp_path)
        wrapper.load_weights()
        assert wrapper.moe.biases
        activation = Activation(7.0, 1.702, "swigluoai")
        assert_right(wrapper.moe, decoded, 5, activation=activation, biases=biases)

    def test_sizes_that_do_not_fit(self, tmp_path):
        experts = Experts(shape_for("q8_0"))
        write_gguf(tmp_path / "model.gguf", experts.tensors())
        wrong = Shape(3, TOP_K, 160, 256)
        with pytest.raises(
            ValueError, match=r"model\.gguf: tensor 'blk\.3\.ffn_gate_exps\.weight' is q8_0 \[3, 224, 160\]"
        ):
            make(wrong, "auto", layer_idx=LAYER, weight_path=tmp_path)


@pytest.mark.parametrize("weight_format", sorted(EXPERT_FORMATS))
def test_random_weights(weight_format):
    """For measurements: finite, and of a size that outputs have with real ones."""
    shape = Shape(experts=2, top_k=1, hidden=512, intermediate=256)
    layer = make_layer(Experts(shape, (weight_format,) * 3))
    layer.fill_random(1)
    x, ids, weights = random_batch(shape, 20)
    out = from_bf16(run(layer, x, ids, weights))
    assert np.isfinite(out).all()
    assert 1e-3 < np.abs(out).mean() < 30
