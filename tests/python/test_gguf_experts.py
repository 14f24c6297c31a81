"""Experts of GGUF files: names, shapes, types, biases and maps, on a layer that records what it gets."""

import json
import os
import re

import numpy as np
import pytest
from gguf_cases import LAYER, TYPES, Experts, RecordingLayer, raw_gguf, tensor, write_gguf
from layer_reference import Shape
from weight_files import checkpoint_tensors, make_layer, originals, write_safetensors

from kt_kernel import KTMoEWrapper, _core
from kt_kernel.methods import METHODS, check_method, fits, format_of, method_of
from kt_kernel.weights import (
    MissingTensorError,
    Traits,
    choose_format,
    choose_traits,
    find_method,
    load_layer,
    load_layer_from_tensors,
    save_layer,
    store,
)
from kt_kernel.weights.gguf_experts import GgufExperts
from kt_kernel.weights.gguf_files import GgufFiles

SHAPE = Shape(experts=4, top_k=2, hidden=64, intermediate=96)
SMALL = [name for name, (_, kind) in TYPES.items() if kind.block <= 32]
LARGE = [name for name in TYPES if name not in SMALL]
BASE = f"blk.{LAYER}.ffn"


def write(folder, experts, naming="packed", extra=None, **options):
    return write_gguf(folder / "model.gguf", experts.tensors(naming) | (extra or {}), **options)


def load(path, experts, layer=None, biases=False, **options) -> RecordingLayer:
    layer = layer or RecordingLayer(experts.shape, experts.format, biases)
    load_layer(layer, "LLAMAFILE", path, LAYER, **options)
    return layer


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("naming", ["packed", "joined", "each"])
def test_every_type_under_every_name(name, naming, tmp_path):
    shape = SHAPE if name in SMALL else Shape(experts=2, top_k=1, hidden=256, intermediate=512)
    experts = Experts(shape, name)
    path = write(tmp_path, experts, naming)
    assert choose_format("LLAMAFILE", path, LAYER, shape.hidden, shape.intermediate).format == name
    layer = load(path, experts)
    assert all(layer.has(expert, experts.expert(expert)) for expert in range(shape.experts))


@pytest.mark.parametrize("naming", ["packed", "each"])
def test_types_of_their_own(naming, tmp_path):
    experts = Experts(SHAPE, ("q4_0", "q5_0", "q8_0"))
    path = write(tmp_path, experts, naming)
    target = choose_format("LLAMAFILE", path, LAYER, SHAPE.hidden, SHAPE.intermediate)
    assert tuple(target) == ("q4_0/q5_0/q8_0", 0)
    layer = load(path, experts)
    assert all(layer.has(expert, experts.expert(expert)) for expert in range(SHAPE.experts))
    with pytest.raises(
        ValueError, match=r"the experts are q4_0/q5_0/q8_0, but this layer was made for q4_0: make it when"
    ):
        load(path, experts, RecordingLayer(SHAPE, "q4_0"))


def test_the_map_and_experts_to_skip(tmp_path):
    experts = Experts(SHAPE, "q5_1")
    path = write(tmp_path, experts)
    layer = load(path, experts, physical_to_logical=[2, 0, 2, 1], skip=[False, True, False, False])
    assert sorted(layer.loaded) == [0, 2, 3]
    assert all(layer.has(slot, experts.expert(expert)) for slot, expert in ((0, 2), (2, 2), (3, 1)))
    done = []
    load(path, experts, progress=lambda *counts: done.append(counts))
    assert done[-1] == (4, 4)
    more = RecordingLayer(Shape(6, 2, SHAPE.hidden, SHAPE.intermediate), "q5_1")
    load(path, experts, more, physical_to_logical=[0, 1, 2, 3, 3, 0])
    assert more.has(5, experts.expert(0))
    with pytest.raises(ValueError, match=r"physical_to_logical_map\[4\] is 4; .*model\.gguf .*has 4 experts"):
        load(path, experts, more)
    with pytest.raises(ValueError, match="has 4 experts; this layer was made for 3"):
        load(path, experts, RecordingLayer(Shape(3, 2, SHAPE.hidden, SHAPE.intermediate), "q5_1"))


class TestBiases:
    def write(self, folder, names=("gate", "up", "down"), kind=np.float32, architecture="gpt-oss"):
        rng = np.random.default_rng(1)
        sizes = {"gate": SHAPE.intermediate, "up": SHAPE.intermediate, "down": SHAPE.hidden}
        biases = {name: rng.standard_normal((SHAPE.experts, sizes[name])).astype(kind) for name in names}
        extra = {f"{BASE}_{name}_exps.bias": bias for name, bias in biases.items()}
        experts = Experts(SHAPE, "mxfp4")
        return write(folder, experts, extra=extra, architecture=architecture), experts, biases

    @pytest.mark.parametrize("kind", [np.float32, np.float16])
    def test_of_gpt_oss(self, kind, tmp_path):
        path, experts, biases = self.write(tmp_path, kind=kind)
        assert choose_traits(str(path), LAYER, None, None, 0.0, 0.0) == Traits(True, "swigluoai", 7.0, 1.702)
        assert tuple(choose_format("LLAMAFILE", path, LAYER, SHAPE.hidden, SHAPE.intermediate)) == ("mxfp4", 32)
        layer = load(path, experts, biases=True, physical_to_logical=[3, 2, 1, 0])
        for slot, expert in enumerate([3, 2, 1, 0]):
            for found, name in zip(layer.loaded_biases[slot], biases, strict=True):
                assert np.array_equal(found, biases[name][expert].astype(np.float32))

    def test_of_one_projection_only(self, tmp_path):
        path, experts, biases = self.write(tmp_path, ("down",), architecture="qwen3moe")
        assert choose_traits(str(path), LAYER, None, None, 0.0, 0.0) == Traits(biases=True)
        gate, up, down = load(path, experts, biases=True).loaded_biases[1]
        assert not gate.any()
        assert not up.any()
        assert len(gate) == len(up) == SHAPE.intermediate
        assert np.array_equal(down, biases["down"][1])

    def test_in_one_tensor(self, tmp_path):
        both = np.arange(SHAPE.experts * 2 * SHAPE.intermediate, dtype=np.float32).reshape(SHAPE.experts, -1)
        experts = Experts(SHAPE, "q8_0")
        path = write(tmp_path, experts, "joined", {f"{BASE}_gate_up_exps.bias": both})
        gate, up, down = load(path, experts, biases=True).loaded_biases[2]
        assert np.array_equal(np.concatenate([gate, up]), both[2])
        assert not down.any()

    def test_layers_with_and_without(self, tmp_path):
        path, experts, _ = self.write(tmp_path)
        with pytest.raises(ValueError, match="the experts have biases, and this layer was made without"):
            load(path, experts)
        path = write(tmp_path, experts)
        with pytest.raises(ValueError, match="the experts have no biases, which this layer needs"):
            load(path, experts, biases=True)

    @pytest.mark.parametrize("bias", [np.ones((4, 64), np.float32), np.ones((4, 96), np.int32)])
    def test_of_a_wrong_shape_or_type(self, bias, tmp_path):
        experts = Experts(SHAPE)
        path = write(tmp_path, experts, extra={f"{BASE}_gate_exps.bias": bias})
        message = r"tensor 'blk\.3\.ffn_gate_exps\.bias' is \w+ \[4, \d+\]; needed is f32 or f16 or bf16 \[4, 96\]"
        with pytest.raises(ValueError, match=message):
            load(path, experts, biases=True)


class TestErrors:
    def refused(self, path, message, error=ValueError, shape=SHAPE) -> None:
        with pytest.raises(error, match=message) as caught:
            choose_format("LLAMAFILE", path, LAYER, shape.hidden, shape.intermediate)
        assert str(path) in str(caught.value)

    def test_another_layer(self, tmp_path):
        path = write_gguf(tmp_path / "model.gguf", Experts(SHAPE).tensors(layer=5))
        self.refused(
            path, "no experts of layer 3 .*'blk.3.ffn_gate_exps.weight'; it has experts of the layers 5..5", KeyError
        )
        path = write_gguf(tmp_path / "dense.gguf", {f"{BASE}_gate.weight": np.ones((4, 4), np.float32)})
        self.refused(path, "no experts of layer 3 .*it has no tensors of experts", MissingTensorError)

    @pytest.mark.parametrize("naming", ["packed", "each"])
    @pytest.mark.parametrize("missing", ["up", "down"])
    def test_a_matrix_is_missing(self, missing, naming, tmp_path):
        tensors = {name: value for name, value in Experts(SHAPE).tensors(naming).items() if f"_{missing}" not in name}
        message = rf"has no tensor 'blk\.3\.ffn_{missing}[^']*'; is the download or the conversion complete"
        self.refused(write_gguf(tmp_path / "model.gguf", tensors), message, KeyError)

    def test_an_expert_is_missing(self, tmp_path):
        tensors = Experts(SHAPE).tensors("each")
        del tensors[f"{BASE}_up.2.weight"]
        self.refused(write_gguf(tmp_path / "model.gguf", tensors), r"no tensor 'blk\.3\.ffn_up\.2\.weight'", KeyError)

    @pytest.mark.parametrize("naming", ["packed", "each"])
    def test_no_gate(self, naming, tmp_path):
        tensors = {name: value for name, value in Experts(SHAPE).tensors(naming).items() if "_gate" not in name}
        message = r"\(layer 3\): the experts have no gate, only 'blk\.3\.ffn_up"
        self.refused(write_gguf(tmp_path / "model.gguf", tensors), message)

    @pytest.mark.parametrize("naming", ["packed", "joined", "each"])
    def test_shapes(self, naming, tmp_path):
        path = write(tmp_path, Experts(SHAPE), naming)
        wide = Shape(4, 2, 64, 128)
        rows = 256 if naming == "joined" else 128
        shape = rf"\[4, {rows}, 64\]" if naming != "each" else r"\[128, 64\]"
        self.refused(path, rf"tensor 'blk\.3\.ffn_gate[^']*' is q8_0 \[.*\]; needed is {shape}", shape=wide)
        assert GgufExperts(GgufFiles(path), LAYER).sizes == (64, 96)

    def test_dimensions(self, tmp_path):
        extra = {f"{BASE}_down_exps.weight": np.ones((64, 96), np.float32)}
        path = write(tmp_path, Experts(SHAPE), extra=extra)
        self.refused(path, r"is .* \[.*\]; needed is")
        with pytest.raises(
            ValueError, match=r"'blk\.3\.ffn_down_exps\.weight' has shape \[64, 96\]; it must be a matrix"
        ):
            GgufExperts(GgufFiles(path), LAYER)

    def test_types_that_differ_between_experts(self, tmp_path):
        tensors = Experts(SHAPE).tensors("each") | {
            f"{BASE}_up.3.weight": Experts(SHAPE, "q4_0").tensors("each")[f"{BASE}_up.3.weight"]
        }
        message = (
            r"'blk\.3\.ffn_up\.3\.weight' is q4_0, that of expert 0 is q8_0; experts of a layer must have the same"
        )
        self.refused(write_gguf(tmp_path / "model.gguf", tensors), message)

    def test_a_type_of_other_tensors(self, tmp_path):
        path = tmp_path / "model.gguf"
        sizes = [(64, 96, 4), (64, 96, 4), (96, 64, 4)]
        size = 64 * 96 * 4
        tensors = [
            tensor(f"{BASE}_{name}_exps.weight", dims, 24, index * size)
            for index, (name, dims) in enumerate(zip(("gate", "up", "down"), sizes, strict=True))
        ]
        path.write_bytes(raw_gguf(tensors=tensors, data=bytes(3 * size)))
        self.refused(
            path, r"'blk\.3\.ffn_gate_exps\.weight' is i8, which no layer computes with.*experts may have bf16, f16"
        )

    def test_tensors_beside_the_matrices(self, tmp_path):
        extra = {f"{BASE}_down_exps.scale": np.ones(4, np.float32)}
        self.refused(
            write(tmp_path, Experts(SHAPE), extra=extra), r"'blk\.3\.ffn_down_exps\.scale': experts have 'scale'"
        )

    @pytest.mark.parametrize("architecture", ["nomic-bert-moe", "smallthinker"])
    def test_other_activations(self, architecture, tmp_path):
        path = write(tmp_path, Experts(SHAPE), architecture=architecture)
        self.refused(path, rf"experts of {architecture} use \w+; layers compute silu, swigluoai, gelu_tanh only")
        assert choose_traits(str(path), LAYER, None, None, 0.0, 0.0).activation is None

    @pytest.mark.parametrize("architecture", ["grok", "gemma4"])
    def test_gelu_is_found(self, architecture, tmp_path):
        path = write(tmp_path, Experts(SHAPE), architecture=architecture)
        assert choose_traits(str(path), LAYER, None, None, 0.0, 0.0).activation == "gelu_tanh"

    def test_what_the_core_says_gets_a_name(self, tmp_path):
        experts = Experts(SHAPE)
        path, layer = write(tmp_path, experts), RecordingLayer(SHAPE, "q8_0")
        layer.error = "scales of up are not finite in row 5"
        message = re.escape(f"{path}: tensor '{BASE}_up_exps.weight' (expert 0): scales are not finite in row 5")
        with pytest.raises(ValueError, match=message):
            load(path, experts, layer)
        layer.error = "something else"
        with pytest.raises(ValueError, match=r"^something else$"):
            load(path, experts, layer)


class TestMethods:
    def test_auto(self, tmp_path):
        path = write(tmp_path, Experts(SHAPE))
        for given in (path, tmp_path, str(path)):
            assert find_method(given, LAYER, SHAPE.hidden, SHAPE.intermediate) == "LLAMAFILE"

    @pytest.mark.parametrize("method", METHODS)
    def test_other_methods_name_the_right_one(self, method, tmp_path):
        path = write(tmp_path, Experts(SHAPE))
        layer = RecordingLayer(SHAPE, format_of(method))
        for given in (path, tmp_path):
            message = f"holds GGUF files, which method {method} does not read: use method='LLAMAFILE'"
            with pytest.raises(ValueError, match=message) as caught:
                load_layer(layer, method, given, LAYER)
            assert str(given) in str(caught.value)

    def test_folders_of_both(self, tmp_path):
        """The method takes its own; "auto" takes safetensors, as it did before there were GGUF files beside them."""
        experts = Experts(SHAPE, "q4_1")
        write(tmp_path, experts)
        names = checkpoint_tensors(originals(SHAPE), f"model.layers.{LAYER}", "separate")
        write_safetensors(tmp_path / "model.safetensors", names)
        assert find_method(tmp_path, LAYER, SHAPE.hidden, SHAPE.intermediate) == "BF16"
        load(tmp_path, experts)
        load_layer(make_layer(SHAPE, "bf16"), "BF16", tmp_path, LAYER)

    def test_safetensors_are_none(self, tmp_path):
        names = checkpoint_tensors(originals(SHAPE), f"model.layers.{LAYER}", "separate")
        path = write_safetensors(tmp_path / "model.safetensors", names)
        for given, verb in ((tmp_path, "has"), (path, "is")):
            message = f"method LLAMAFILE reads GGUF files, and {re.escape(str(given))} {verb} none: use another method"
            with pytest.raises(ValueError, match=message):
                load_layer(RecordingLayer(SHAPE, "q8_0"), "LLAMAFILE", given, LAYER)
            with pytest.raises(ValueError, match=message):
                choose_format("LLAMAFILE", given, LAYER, SHAPE.hidden, SHAPE.intermediate)

    def test_a_file_is_needed(self, tmp_path):
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "moe_intermediate_size": 96}
        with pytest.raises(ValueError, match="method='LLAMAFILE' needs weight_path"):
            KTMoEWrapper(layer_idx=LAYER, **sizes, method="LLAMAFILE")
        with pytest.raises(FileNotFoundError, match="absent does not exist"):
            KTMoEWrapper(layer_idx=LAYER, **sizes, method="LLAMAFILE", weight_path=tmp_path / "absent")
        path = write(tmp_path, Experts(SHAPE))
        with pytest.raises(KeyError, match="no experts of layer 0"):
            KTMoEWrapper(layer_idx=0, **sizes, method="LLAMAFILE", weight_path=path)

    def test_layers_of_other_formats(self, tmp_path):
        path = write(tmp_path, Experts(SHAPE))
        for name in ("int8", "fp8", "nvfp4", "q8_0/q8_0/int8"):
            with pytest.raises(
                ValueError, match=f"method LLAMAFILE needs a layer of a type of GGUF files; this one is {name}"
            ):
                load_layer(RecordingLayer(SHAPE, name), "LLAMAFILE", path, LAYER)

    def test_tensors_and_conversions(self, tmp_path):
        layer = RecordingLayer(SHAPE, "q8_0")
        with pytest.raises(ValueError, match="LLAMAFILE keeps the types of a GGUF file, which load_weights"):
            load_layer_from_tensors(layer, "LLAMAFILE", *(np.zeros((4, 8, 8), np.float32),) * 3)
        path = write(tmp_path, Experts(SHAPE))
        for given in (path, tmp_path):
            with pytest.raises(ValueError, match="holds GGUF files: method LLAMAFILE loads them as they are"):
                save_layer(None, "AMXINT8", given, LAYER, tmp_path / "out")
        names = checkpoint_tensors(originals(SHAPE), f"model.layers.{LAYER}", "separate")
        source = write_safetensors(tmp_path / "checkpoint" / "model.safetensors", names)
        with pytest.raises(ValueError, match="LLAMAFILE keeps weights as they are: there is nothing to convert"):
            save_layer(_core.Pool([1]), "LLAMAFILE", source, LAYER, tmp_path / "out")

    def test_names(self):
        check_method("LLAMAFILE")
        with pytest.raises(ValueError, match=r"the methods are BF16, .*, LLAMAFILE"):
            check_method("GGUF")
        with pytest.raises(ValueError, match="has no format of its own"):
            format_of("LLAMAFILE")
        assert fits("LLAMAFILE", "q4_k/q4_k/q6_k")
        assert not fits("LLAMAFILE", "q4_k/q4_k/int8")
        assert method_of("q4_k/q4_k/q6_k") == method_of("q4_k") == "LLAMAFILE"
        assert method_of("bf16") == "BF16"
        assert method_of("mxfp4") == "MXFP4"


def test_a_limit_of_the_activation_reaches_the_layer(tmp_path):
    path = write(tmp_path, Experts(SHAPE), architecture="deepseek4", fields={"deepseek4.swiglu_clamp_exp": 10.0})
    assert choose_traits(str(path), LAYER, None, None, 0.0, 0.0) == Traits(swiglu_limit=10.0)
    assert choose_traits(str(path), LAYER, None, None, 3.0, 0.0).swiglu_limit == 3.0


def test_config_json_beside_says_nothing_about_gguf(tmp_path):
    """Of a folder with both, GGUF files are read as their own header says."""
    path = write(tmp_path, Experts(SHAPE))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    assert choose_traits(str(path), LAYER, None, None, 0.0, 0.0) == Traits()


def test_what_the_store_remembers(tmp_path):
    """Of the files with something of the layer: name, size, time and header."""
    experts = Experts(SHAPE, "q4_0")
    tensors = {"token_embd.weight": np.ones((4, 32), np.float32), "output.weight": np.ones((4, 32), np.float32)}
    write_gguf(tmp_path / "model.gguf", tensors | experts.tensors(), split_max_tensors=2)
    first, *mine = sorted(tmp_path.glob("*.gguf"))

    def sources():
        return store._sources(GgufFiles(tmp_path), LAYER)

    before = sources()
    assert [name for name, *_ in before] == [path.name for path in mine]
    assert [facts[:2] for _, *facts in before] == [[path.stat().st_size, path.stat().st_mtime_ns] for path in mine]
    os.utime(first, ns=(0, 0))
    assert sources() == before
    content, status = mine[1].read_bytes(), mine[1].stat()
    for changed in (content.replace(b"_down_exps.weight", b"_down_exps.weighs"), content[:-1] + b"\x55"):
        mine[1].write_bytes(changed)
        os.utime(mine[1], ns=(status.st_atime_ns, status.st_mtime_ns))
        store._header_digest.cache_clear()
        assert (sources() == before) == (changed[:-1] == content[:-1])
    assert store.file_name(tmp_path, 7, "q4_k/q4_k/q6_k") == f"{tmp_path.name}.layer-00007.q4_k-q4_k-q6_k.ktpack"
