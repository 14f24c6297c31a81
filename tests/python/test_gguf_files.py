"""Which files make a GGUF model: one, the parts of one, or what is in a folder."""

import re
import shutil

import numpy as np
import pytest
from gguf_cases import LAYER, Experts, RecordingLayer, field, gguf, raw_gguf, tensor, write_gguf
from layer_reference import Shape

from kt_kernel.weights import find_method, load_layer, model_config
from kt_kernel.weights.gguf_files import GgufFiles, find_files, is_gguf_file
from kt_kernel.weights.tensor_files import MissingTensorError

SHAPE = Shape(experts=3, top_k=2, hidden=64, intermediate=96)
FIELDS = {"qwen3moe.expert_count": 3, "qwen3moe.expert_used_count": 2, "qwen3moe.block_count": 5}


def split(folder, name="model", **options):
    """Three parts, with the experts of the layer in two of them."""
    experts = Experts(SHAPE, "q4_0")
    tensors = {"token_embd.weight": np.ones((4, 32), np.float32)} | experts.tensors()
    write_gguf(folder / f"{name}.gguf", tensors | {"z": np.ones(8, np.float32)}, split_max_tensors=2, **options)
    parts = sorted(folder.glob(f"{name}-*.gguf"))
    assert [part.name for part in parts] == [f"{name}-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return parts, experts


def loads(path, experts) -> None:
    layer = RecordingLayer(SHAPE, experts.format)
    load_layer(layer, "LLAMAFILE", path, LAYER)
    assert all(layer.has(expert, experts.expert(expert)) for expert in range(SHAPE.experts))


def test_every_part_and_the_folder_give_the_same(tmp_path):
    parts, experts = split(tmp_path)
    for path in (*parts, tmp_path):
        assert find_files(path) == parts
        loads(path, experts)
    parts = [part.rename(part.with_suffix(".GGUF")) for part in parts]
    assert find_files(parts[1]) == find_files(tmp_path) == parts


def test_a_file_under_any_name(tmp_path):
    experts = Experts(SHAPE, "q4_0")
    for name in ("model.GGUF", "sha256-0123", "a.b-00001-of-2.gguf", "c-00001-of-00000.gguf"):
        path = write_gguf(tmp_path / name, experts.tensors())
        assert is_gguf_file(path)
        assert find_method(path, LAYER, SHAPE.hidden, SHAPE.intermediate) == "LLAMAFILE"
        loads(path, experts)
    assert not is_gguf_file(tmp_path)
    assert not is_gguf_file(tmp_path / "absent.gguf")


def test_what_goes_with_a_model_is_left_out(tmp_path):
    parts, experts = split(tmp_path)
    write_gguf(tmp_path / "mmproj-model.gguf", {"v": np.ones(4, np.float32)}, "clip")
    write_gguf(tmp_path / "a-projector.gguf", {"v": np.ones(4, np.float32)}, fields={"general.type": "mmproj"})
    write_gguf(tmp_path / "imatrix.gguf", {"v": np.ones(4, np.float32)}, fields={"general.type": "imatrix"})
    assert find_files(tmp_path) == parts
    loads(tmp_path, experts)
    for part in parts:
        part.unlink()
    with pytest.raises(ValueError, match="has no model, only what goes with one"):
        find_files(tmp_path)


def test_several_models_in_a_folder(tmp_path):
    split(tmp_path)
    write_gguf(tmp_path / "other.gguf", Experts(SHAPE).tensors())
    with pytest.raises(ValueError, match=r"has several models \(model, other\.gguf\); give the \.gguf file") as caught:
        find_files(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_parts_that_are_missing(tmp_path):
    parts, _ = split(tmp_path)
    parts[1].unlink()
    message = r"of the 3 parts of model 1 are missing: model-00002-of-00003\.gguf; download them"
    for path in (parts[0], parts[2], tmp_path):
        with pytest.raises(FileNotFoundError, match=message) as caught:
            find_files(path)
        assert str(tmp_path) in str(caught.value)
    lonely = tmp_path / "big-00002-of-99999.gguf"
    shutil.copy(parts[0], lonely)
    with pytest.raises(FileNotFoundError, match=r"99998 are missing: big-00001-of-99999\.gguf, .* and 99995 more"):
        find_files(lonely)


def test_what_parts_say_is_checked(tmp_path):
    parts, _ = split(tmp_path)
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ValueError, match=r"00003-of-00003\.gguf says that it is part 2 of 3, its name says 3 of 3"):
        GgufFiles(tmp_path)
    alone = tmp_path / "alone" / "renamed.gguf"
    alone.parent.mkdir()
    shutil.copy(parts[0], alone)
    with pytest.raises(ValueError, match=r"renamed\.gguf is part 1 of 3, and its name does not tell the others"):
        GgufFiles(alone)


def raw_parts(folder, *contents):
    for number, content in enumerate(contents, 1):
        (folder / f"m-{number:05d}-of-{len(contents):05d}.gguf").write_bytes(content)


def test_parts_that_say_nothing(tmp_path):
    one, two = (raw_gguf(tensors=[tensor(name)], data=bytes(128)) for name in "ab")
    raw_parts(tmp_path, one, two)
    assert set(GgufFiles(tmp_path)) == {"a", "b"}
    raw_parts(tmp_path, one, one)
    with pytest.raises(ValueError, match=r"tensor 'a' is both in .*m-00001-of-00002\.gguf and in .*m-00002-of-00002"):
        GgufFiles(tmp_path)


def test_the_number_of_tensors_of_all_parts(tmp_path):
    said = [field("split.tensors.count", 5, (3).to_bytes(4, "little"))]
    one, two = (raw_gguf(said, tensors=[tensor(name)], data=bytes(128)) for name in "ab")
    raw_parts(tmp_path, one, two)
    with pytest.raises(ValueError, match="the 2 parts have 3 tensors; they have 2"):
        GgufFiles(tmp_path)
    odd = [field("split.count", 8, b"\1\0\0\0\0\0\0\0x")]
    raw_parts(tmp_path, raw_gguf(odd, tensors=[tensor("a")], data=bytes(128)), two)
    with pytest.raises(ValueError, match=r"m-00001.*split\.count is 'x'; needed is a whole number"):
        GgufFiles(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        GgufFiles(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"has no \*\.gguf; give the file"):
        GgufFiles(tmp_path)
    write_gguf(tmp_path / "Q4_0" / "model.gguf", Experts(SHAPE).tensors())
    with pytest.raises(FileNotFoundError, match=r"has no \*\.gguf; there are some in Q4_0/; give"):
        GgufFiles(tmp_path)
    files = GgufFiles(tmp_path / "Q4_0")
    with pytest.raises(MissingTensorError, match="has no tensor 'x'; is the download or the conversion complete"):
        files.entry("x")


def test_a_file_that_becomes_shorter(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", Experts(SHAPE).tensors())
    files = GgufFiles(path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 100)
    last = max(files, key=lambda name: files.entry(name).end)
    with pytest.raises(ValueError, match="became shorter"):
        files.rows(last, 0, 1)


class TestConfig:
    def test_sizes_come_from_the_tensors(self, tmp_path):
        tensors = Experts(SHAPE).tensors(layer=1) | Experts(SHAPE).tensors(layer=4)
        path = write_gguf(tmp_path / "model.gguf", tensors, fields=FIELDS)
        config = model_config(path)
        assert config == model_config(tmp_path)
        assert (config.model_type, config.num_experts, config.num_experts_per_tok) == ("qwen3moe", 3, 2)
        assert (config.hidden_size, config.moe_intermediate_size, config.num_layers) == (64, 96, 5)
        assert config.moe_layers == (1, 4)
        assert (config.activation, config.swiglu_limit, config.swiglu_alpha) == ("silu", 0.0, 0.0)

    @pytest.mark.parametrize("naming", ["joined", "each"])
    def test_under_other_names(self, naming, tmp_path):
        path = write_gguf(tmp_path / "model.gguf", Experts(SHAPE).tensors(naming), fields=FIELDS)
        assert model_config(path).moe_layers == (LAYER,)
        assert model_config(path).moe_intermediate_size == 96

    @pytest.mark.parametrize(
        ("used", "expected"), [([2, 2, 0, 2], 2), ([2, 3], None), (0, None), ("2", None), (4, None)]
    )
    def test_experts_per_token(self, used, expected, tmp_path):
        fields = FIELDS | {"qwen3moe.expert_used_count": used}
        path = write_gguf(tmp_path / "model.gguf", Experts(SHAPE).tensors(), fields=fields)
        if expected:
            assert model_config(path).num_experts_per_tok == expected
        else:
            message = "4 experts per token, but there are 3" if used == 4 else "expert_used_count is .*; needed is one"
            with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{message}"):
                model_config(path)

    @pytest.mark.parametrize(
        ("architecture", "fields", "expected"),
        [
            ("gpt-oss", {}, ("swigluoai", 7.0, 1.702)),
            ("grok", {}, ("gelu_tanh", 0.0, 0.0)),
            ("nomic-bert-moe", {}, ("gelu", 0.0, 0.0)),
            ("deepseek4", {"deepseek4.swiglu_clamp_exp": 10.0}, ("silu", 10.0, 0.0)),
            ("deepseek4", {"deepseek4.swiglu_clamp_exp": [0.0, 0.0, 0.0, 10.0]}, ("silu", 10.0, 0.0)),
            ("step35", {"step35.swiglu_clamp_exp": [0.0, 0.0, 0.0, 7.0]}, ("silu clamped to 7", 0.0, 0.0)),
            ("step35", {"step35.swiglu_clamp_exp": [7.0, 7.0, 7.0, 0.0]}, ("silu", 0.0, 0.0)),
        ],
    )
    def test_activations(self, architecture, fields, expected, tmp_path):
        counts = {key.replace("qwen3moe", architecture): value for key, value in FIELDS.items()}
        path = write_gguf(tmp_path / "model.gguf", Experts(SHAPE).tensors(), architecture, counts | fields)
        config = model_config(path)
        assert (config.activation, config.swiglu_limit, config.swiglu_alpha) == expected

    def test_a_dense_model(self, tmp_path):
        path = write_gguf(tmp_path / "model.gguf", {"blk.0.ffn_down.weight": np.ones((4, 4), np.float32)})
        with pytest.raises(ValueError, match="has no tensors of experts; is it a model with experts"):
            model_config(path)

    def test_config_json_goes_first(self, tmp_path):
        write_gguf(tmp_path / "model.gguf", Experts(SHAPE).tensors(), fields=FIELDS)
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ValueError, match=r"config\.json has no num_experts"):
            model_config(tmp_path)


def test_the_package_knows_no_other_names_of_experts():
    """A name that llama.cpp gives to matrices of routed experts and we do not read would show here."""
    known = {"ffn_norm_exps", "ffn_gate_exps", "ffn_down_exps", "ffn_up_exps", "ffn_gate_up_exps"}
    known |= {f"ffn_{projection}_chexps" for projection in ("gate", "up", "down")}  # GroveMoE's, beside the others
    names = {name.removeprefix("blk.{bid}.") for name in gguf.constants.TENSOR_NAMES.values()}
    assert {name for name in names if re.search(r"exps\b", name)} == known
