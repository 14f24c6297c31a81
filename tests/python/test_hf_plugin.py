"""from_pretrained with KTConfig: what it computes, where experts come from, what it refuses."""

import json
import logging
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: its plugin was not tested")

import torch
from hf_checkpoints import SIZES, make_toy, save_toy
from hf_models import eager_logits, error, logits, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kt_kernel import _core
from kt_kernel.hf import KTConfig, sources
from kt_kernel.hf.activations import Activation, find_activation
from kt_kernel.hf.linear import KTLinear
from kt_kernel.weights import save_layer

SMALL = {"threads": 2, "subpools": 1}
# |error| / |logits|, the experts of one layer quantised: measured 0.003, 0.015, 0.18 and 0.13.
LIMITS = {"BF16": 0.01, "AMXINT8": 0.03, "AMXINT4": 0.3, "INT4G": 0.2}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def expected(toy):
    return eager_logits(AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32))


def load(folder, dtype: torch.dtype = torch.float32, **options):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=KTConfig(**SMALL | options), dtype=dtype)


def experts_of(model):
    return model.model.layers[1].mlp.experts


@pytest.mark.parametrize("method", LIMITS)
def test_logits(method, toy, expected):
    model = load(toy, method=method)
    assert experts_of(model).kt_layer.wrapper.method == method
    assert error(logits(model), expected) < LIMITS[method]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, toy, expected):
    result = logits(load(toy, dtype))
    assert result.dtype == dtype
    assert error(result, expected) < 0.05  # of the rest of the model


def test_generate(toy):
    reference = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)
    greedy = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(load(toy).generate(tokens(), **greedy), reference.generate(tokens(), **greedy))


@pytest.mark.parametrize(("linears", "limit"), [("auto", 0.02), ("bf16", 0.02), ("int8", 0.05), (None, 0.01)])
def test_linears(linears, limit, toy, expected):
    model = load(toy, linears=linears)
    packed = [module for module in model.modules() if isinstance(module, KTLinear)]
    assert len(packed) == (0 if linears is None else 2 * 4 + 3 + 1)  # attention, the dense layer, the head
    assert {module.kt_linear.format for module in packed} <= {"int8" if linears == "int8" else "bf16"}
    assert error(logits(model), expected) < limit


def test_experts_are_no_parameters(toy):
    model = load(toy)
    assert not any("experts" in name for name in model.state_dict())
    assert model.hf_quantizer.choices["model.layers.1.mlp.experts"].way.value == "files"


def test_several_files(tmp_path, toy, expected):
    model = make_toy()
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert error(logits(load(tmp_path)), expected) < LIMITS["BF16"]


def test_a_file_among_others(tmp_path, toy, expected):
    for name in ("model.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes((toy / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes((toy / "config.json").read_bytes())
    model = load(tmp_path)
    assert [choice.way.value for choice in model.hf_quantizer.choices.values()] == ["files"]
    assert error(logits(model), expected) < LIMITS["BF16"]


def test_experts_by_names_that_transformers_lacks(tmp_path):
    """llmcompressor calls the matrices of Mixtral's experts as those of other families."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "vocab_size": 64,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    reference = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for old, new in {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    assert any("block_sparse_moe.experts.3.gate_proj" in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert error(logits(load(tmp_path)), eager_logits(reference)) < LIMITS["BF16"]


def test_what_is_not_safetensors_is_packed_from_tensors(tmp_path, toy, expected):
    torch.save(load_file(toy / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((toy / "config.json").read_bytes())
    model = load(tmp_path, method="AMXINT8")
    assert [choice.way.value for choice in model.hf_quantizer.choices.values()] == ["tensors"]
    assert error(logits(model), expected) < LIMITS["AMXINT8"]


def test_converted_experts(toy, expected, tmp_path):
    save_layer(_core.Pool([2]), "AMXINT8", toy, 1, tmp_path)
    model = load(toy, weight_path=tmp_path)
    assert experts_of(model).kt_layer.wrapper.method == "AMXINT8"
    assert error(logits(model), expected) < LIMITS["AMXINT8"]


def test_experts_of_a_gguf_file(toy, expected, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: its files were not tested")
    tensors = load_file(toy / "model.safetensors")
    writer = gguf.GGUFWriter(tmp_path / "experts.gguf", "qwen3moe")
    for ours, theirs in (("gate", "gate"), ("up", "up"), ("down", "down")):
        names = [f"model.layers.1.mlp.experts.{expert}.{ours}_proj.weight" for expert in range(SIZES["num_experts"])]
        stacked = torch.stack([tensors[name].float() for name in names]).numpy()
        quantised = gguf.quants.quantize(stacked, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.1.ffn_{theirs}_exps.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = load(toy, weight_path=tmp_path / "experts.gguf")
    assert experts_of(model).kt_layer.wrapper.method == "LLAMAFILE"
    assert error(logits(model), expected) < LIMITS["AMXINT8"]


def test_packed_experts_are_kept(toy, tmp_path):
    first = logits(load(toy, method="AMXINT8", store=tmp_path))
    (kept,) = tmp_path.glob(f"{toy.name}.layer-*.ktpack")
    written = kept.stat().st_mtime_ns
    assert torch.equal(logits(load(toy, method="AMXINT8", store=tmp_path)), first)
    assert kept.stat().st_mtime_ns == written


def test_a_config_serves_several_models(toy, expected):
    config = KTConfig(**SMALL)
    for _ in range(2):
        model = AutoModelForCausalLM.from_pretrained(toy, quantization_config=config, dtype=torch.float32)
        assert error(logits(model), expected) < LIMITS["BF16"]
    assert json.loads(config.to_json_string())["method"] == "auto"


def test_a_dictionary_will_do(toy):
    model = AutoModelForCausalLM.from_pretrained(toy, quantization_config={"quant_method": "kt", **SMALL})
    assert experts_of(model).kt_layer.wrapper.method == "BF16"


# One call


def test_calls(toy):
    layer = experts_of(load(toy, torch.bfloat16)).kt_layer
    count, hidden = 5, SIZES["hidden_size"]
    x = torch.randn(count, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    index = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [7, 0]])
    weights = torch.full((count, 2), 0.5)
    out = layer(x, index, weights)
    assert torch.equal(layer(x, index.int(), weights.bfloat16()), out)
    assert torch.equal(layer(x.float(), index, weights), out.float())
    assert torch.equal(layer(x.repeat(1, 2)[:, :hidden], index, weights), out)  # rows apart
    assert layer(x[:0], index[:0], weights[:0]).shape == (0, hidden)
    # The id after the last one marks experts of another process.
    skipped = index.clone()
    skipped[:, 1] = SIZES["num_experts"]
    halves = [layer(x, part, weights) for part in (skipped, skipped.flip(1))]
    assert torch.equal(*halves)
    assert not torch.equal(halves[0], out)


def test_another_number_of_experts_per_token_is_an_error(toy):
    layer = experts_of(load(toy)).kt_layer
    with pytest.raises(ValueError, match="layer 1 was loaded for 2 experts per token, and the router chose 3"):
        layer(torch.zeros(1, SIZES["hidden_size"]), torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3))


def test_hidden_states_that_do_not_fit_are_an_error(toy):
    layer = experts_of(load(toy)).kt_layer
    index, weights = torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 2)
    for x in (torch.zeros(2, 64), torch.zeros(1, SIZES["hidden_size"]), torch.zeros(2, 128, device="meta")):
        with pytest.raises(ValueError, match=r"layer 1 got hidden states .* for 2 tokens; needed is \[tokens, 128\]"):
            layer(x, index, weights)


def test_a_backward_pass_is_an_error(toy):
    model = load(toy)
    with pytest.raises(RuntimeError, match="no gradients"):
        model(tokens()).logits.sum().backward()


# Refusals


def test_saving_is_refused_and_leaves_nothing(toy, tmp_path):
    with pytest.raises(ValueError, match="cannot be saved: copy the folder"):
        load(toy).save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.glob("saved/*.safetensors"))


def test_a_model_without_experts_is_refused(tmp_path):
    sizes = {name: value for name, value in SIZES.items() if "expert" not in name and "moe" not in name}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"method": "INT3"}, ValueError, "method='INT3' is unknown"),
        ({"weight_path": "/nowhere"}, FileNotFoundError, "weight_path /nowhere does not exist"),
        ({"linears": "int3"}, ValueError, "linears='int3' is unknown"),
        ({"gpu_experts": -1}, ValueError, "gpu_experts=-1"),
        ({"gpu_experts": "all"}, TypeError, "gpu_experts must be a count"),
        ({"gpu_experts": [[1, 0]]}, TypeError, "gpu_experts must be a count"),
    ],
)
def test_a_wrong_option_is_named(options, kind, message):
    with pytest.raises(kind, match=message):
        KTConfig(**options)


def test_a_missing_expert_is_named(toy, tmp_path):
    tensors = load_file(toy / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((toy / "config.json").read_bytes())
    with pytest.raises(KeyError, match=r"model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("missing", ["gate_up_proj", "down_proj"])
def test_missing_experts_are_not_made_up(missing, toy, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_objection", lambda *_: "a test says so")
    parts = ("gate_proj", "up_proj") if missing == "gate_up_proj" else (missing,)
    tensors = {name: t for name, t in load_file(toy / "model.safetensors").items() if not name.endswith(_ends(parts))}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((toy / "config.json").read_bytes())
    with pytest.raises(
        ValueError, match=rf"no weights for model\.layers\.1\.mlp\.experts\.{missing}; is the checkpoint"
    ):
        load(tmp_path)


def _ends(parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"experts.{expert}.{part}.weight" for expert in range(SIZES["num_experts"]) for part in parts)


def test_weights_that_do_not_fit_are_refused(toy, tmp_path):
    save_toy(tmp_path, moe_intermediate_size=96)
    with pytest.raises(ValueError, match=r"cannot fill model\.layers\.1.*intermediate size 96 instead of 64"):
        load(toy, weight_path=tmp_path)


# Activations


def test_an_activation_that_is_not_ours_stays_with_transformers(tmp_path, caplog):
    save_toy(tmp_path, hidden_act="quick_gelu")
    expected = eager_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    with caplog.at_level(logging.WARNING, "kt_kernel.hf"):
        model = load(tmp_path)
    assert "model.layers.1.mlp.experts" in caplog.text
    assert "QuickGELUActivation" in caplog.text
    assert error(logits(model), expected) < 1e-4


@pytest.mark.parametrize(
    ("model_type", "fields", "activation"),
    [
        ("qwen3_moe", {}, Activation("silu")),
        ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}, Activation("gelu_tanh")),
        ("qwen3_moe", {"hidden_act": "gelu"}, None),
        ("gpt_oss", {"swiglu_limit": 3.0}, Activation("swigluoai", 3.0, 1.702, alternating=True)),
        ("deepseek_v4", {"swiglu_limit": 2.0}, Activation("silu", 2.0)),
        ("deepseek_v4", {"swiglu_limit": 1000.0}, Activation("silu", 1000.0)),
    ],
)
def test_activations_are_found(model_type, fields, activation):
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | fields))
        module = next(module for module in model.modules() if hasattr(module, "is_concatenated"))
        assert find_activation(module) == activation


def test_an_older_transformers_is_refused():
    code = "import transformers; transformers.__version__ = '5.20.2'; import kt_kernel.hf"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: kt_kernel.hf needs transformers 5.21 or later, and found 5.20.2" in result.stderr


def test_importing_the_package_does_not_import_transformers():
    code = "import sys, kt_kernel; print('transformers' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False"] * 2
