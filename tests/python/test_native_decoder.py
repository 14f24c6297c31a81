"""The native decoder against transformers: tiny models of every family that it knows.

Models have random weights in bf16. The reference is transformers' forward in float32 without any cache; transformers'
own bf16 is 0.5 to 0.6 % away from it, the native decoder about as much, and a key too many 10 % and more.
"""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_cases import WINDOW, random_prompt, tiny_model  # noqa: E402

from kt_kernel import _core  # noqa: E402
from kt_kernel.engine import native  # noqa: E402
from kt_kernel.engine.forward import SlotForward, relative_error  # noqa: E402
from kt_kernel.hf import KTConfig  # noqa: E402
from kt_kernel.hf.linear import KTLinear, replace_linears  # noqa: E402

LENGTH, START = 40, 20
TOLERANCE = 0.015
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 24}
LATENT |= {"qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.8, "mscale_all_dim": 0.6}
# What a family needs besides, so that all it can do is done.
OPTIONS = {
    "deepseek_v2": LATENT | GROUPS | {"topk_method": "group_limited_greedy", "q_lora_rank": None},
    "deepseek_v3": LATENT | GROUPS | {"rope_parameters": YARN, "max_position_embeddings": 64},
    "dots1": {"n_group": 4, "topk_group": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe_lite": LATENT | GROUPS | {"norm_topk_prob": False, "rms_norm_eps": 0.01},
    "glm4_moe": {"n_group": 2, "topk_group": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "granitemoe": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 4.0,
        "attention_multiplier": 0.3,
    },
    "minicpm3": LATENT | {"scale_emb": 3.0, "scale_depth": 1.2, "dim_model_base": 16},
    "minimax_m2": {"rotary_dim": 8},
    "mistral": {"sliding_window": WINDOW},
    "qwen3_moe": {"norm_topk_prob": False},
    "youtu": LATENT | {"rope_interleave": False, "attention_bias": True},
}
DENSE = {"llama", "minicpm3", "mistral", "qwen2", "qwen3", "youtu"}
# Other ways of the same families.
VARIANTS = {
    "deepseek_v2": {"topk_method": "greedy", "rope_parameters": YARN, "max_position_embeddings": 64},
    "deepseek_v3": LATENT | {"q_lora_rank": None, "rope_interleave": False, "v_head_dim": 32, "attention_bias": True},
}


def save_tiny(family: str, folder, options: dict) -> None:
    model = tiny_model(family, torch.bfloat16, **options)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> folder of its checkpoint, each made once."""
    made = {}

    def folder(family: str):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_tiny(family, made[family], OPTIONS.get(family, {}))
        return made[family]

    return folder


def load(folder, family: str, method: str = "BF16", linears: str | None = None, threads: int = 2, subpools: int = 1):
    """The model as the engine has it; linears that stay with torch are packed by native.build."""
    plugin = (
        {} if family in DENSE else {"quantization_config": KTConfig(method=method, threads=threads, subpools=subpools)}
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **plugin).eval()
    if linears:
        replace_linears(model, linears, native._runtime_of(model))
    return model


def native_forward(model, slots: int = 4, context: int = 64) -> SlotForward:
    forward = SlotForward(model, slots, context)
    decode = native.build(model, forward.cache)
    assert not isinstance(decode, str), decode
    forward._native = decode
    return forward


def decode_text(forward: SlotForward, text: list[int], start: int = START, slot: int = 1) -> torch.Tensor:
    forward.keep(slot, 0)
    forward.prefill(slot, text[:start])
    return torch.cat([forward.decode([slot], [text[i]], [i]) for i in range(start, len(text))])


def reference(folder, text: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()


@torch.inference_mode()
@pytest.mark.parametrize("family", native.FAMILIES)
def test_logits_are_those_of_transformers(family, folders):
    check_logits(folders(family), family)


@torch.inference_mode()
@pytest.mark.parametrize("family", VARIANTS)
def test_logits_of_other_ways_of_a_family(family, tmp_path):
    save_tiny(family, tmp_path, OPTIONS[family] | VARIANTS[family])
    check_logits(tmp_path, family)


def check_logits(folder, family: str) -> None:
    text = random_prompt(LENGTH, 3)
    expected = reference(folder, text)[START:]
    model = load(folder, family)
    theirs = decode_text(SlotForward(model, 2, LENGTH), text)
    ours = decode_text(native_forward(model, 2, LENGTH), text)
    assert relative_error(theirs, expected) < TOLERANCE
    assert relative_error(ours, expected) < TOLERANCE
    assert relative_error(ours, expected) < 1.5 * relative_error(theirs, expected)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_key_too_many_is_noticed(family, folders, monkeypatch):
    """The control of the comparison above."""
    text = random_prompt(LENGTH, 3)
    expected = reference(folders(family), text)[START:]
    monkeypatch.setattr(native, "_window", lambda parts, layer: WINDOW + 1)
    forward = native_forward(load(folders(family), family), 2, LENGTH)
    assert relative_error(decode_text(forward, text), expected) > 3 * TOLERANCE


def step_of_all(forward: SlotForward, texts: list[list[int]]) -> torch.Tensor:
    return forward.decode(list(range(len(texts))), [text[-1] for text in texts], [len(text) - 1 for text in texts])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "method", "linears"),
    [
        ("gpt_oss", "BF16", "bf16"),
        ("qwen2_moe", "AMXINT8", "int8"),
        ("glm4_moe", "AMXINT8", "bf16"),
        ("mixtral", "AMXINT4", "int8"),
        ("deepseek_v2", "BF16", "bf16"),
        ("deepseek_v3", "AMXINT8", "int8"),
    ],
)
def test_requests_get_the_bits_that_they_would_get_alone(family, method, linears, folders):
    lengths = [1, 2, 9, 150, 30, 129, 128, 17, 5, 64, 131, 3]
    if family == "deepseek_v3":  # the most that are alone
        lengths += range(4, 24)
    forward = native_forward(load(folders(family), family, method, linears), slots=len(lengths), context=160)
    texts = [random_prompt(length + 1, seed) for seed, length in enumerate(lengths)]
    for slot, text in enumerate(texts):
        forward.prefill(slot, text[:-1])
    together = step_of_all(forward, texts)
    for slot, text in enumerate(texts):
        forward.keep(slot, len(text) - 1)
        alone = forward.decode([slot], [text[-1]], [len(text) - 1])
        assert torch.equal(alone[0], together[slot])


@torch.inference_mode()
def test_threads_change_no_bit(folders):
    text = random_prompt(300, 5)
    found = []
    for threads in (1, 2, 3):
        forward = native_forward(load(folders("qwen3_moe"), "qwen3_moe", threads=threads), 1, 300)
        found.append(decode_text(forward, text, start=296, slot=0))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@torch.inference_mode()
def test_several_nodes(tmp_path):
    tiny_model("glm4_moe", torch.bfloat16, moe_intermediate_size=128).save_pretrained(tmp_path)
    text = random_prompt(LENGTH, 3)
    expected = reference(tmp_path, text)[START:]
    model = load(tmp_path, "glm4_moe", subpools=2)
    assert native._runtime_of(model).pool.nodes == 2
    assert relative_error(decode_text(native_forward(model, 2, LENGTH), text), expected) < TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v2"])
def test_long_texts_are_split_and_merged(family, folders):
    """Beyond 128 keys attention is cut into parts; beyond 4,096 the parts get longer."""
    assert "full_attention" in getattr(reference_config(folders(family)), "layer_types", ["full_attention"])
    text = random_prompt(4300, 6)
    model = load(folders(family), family)
    ours = decode_text(native_forward(model, 2, 4300), text, start=4290)
    theirs = decode_text(SlotForward(model, 2, 4300), text, start=4290)
    assert relative_error(ours, theirs) < TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize("linears", ["bf16", "int8"])
def test_latents_are_all_that_is_kept(linears, folders):
    """Of a token 32 + 16 numbers in each layer; copied to another slot, or kept of a longer text, they do as well."""
    model = load(folders("deepseek_v3"), "deepseek_v3", linears=linears)
    forward = native_forward(model, 3, LENGTH)
    text = random_prompt(LENGTH, 3)
    expected = decode_text(forward, text)
    assert forward.cache.bytes_per_token == 2 * 2 * (32 + 16)
    assert forward.cache.keys[0].untyped_storage().nbytes() == 3 * LENGTH * 2 * (32 + 16)
    forward.keep(1, START + 5)
    forward.copy(1, 2, START + 5)
    for slot in (1, 2):
        again = [forward.decode([slot], [text[i]], [i]) for i in range(START + 5, LENGTH)]
        assert torch.equal(torch.cat(again), expected[5:])


@torch.inference_mode()
def test_wrong_latents_are_noticed_at_load(folders, monkeypatch, caplog):
    """The control of MLA: rotary embeddings, on which almost everything depends here, of other pairs."""
    caplog.set_level("INFO")
    model = load(folders("deepseek_v3"), "deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.weight[-16:] *= 10
    right = SlotForward(model, 2, LENGTH)
    right.use_native(native.build)
    assert right.decoder == "native"
    family = native.FAMILIES["deepseek_v3"]
    monkeypatch.setitem(native.FAMILIES, "deepseek_v3", dataclasses.replace(family, pairs="halves"))
    wrong = SlotForward(model, 2, LENGTH)
    wrong.use_native(native.build)
    assert wrong.decoder == "transformers"
    assert "decode stays with transformers: the native decoder's logits differ" in caplog.text


@torch.inference_mode()
def test_a_cache_of_something_else_is_refused(folders, caplog):
    caplog.set_level("INFO")
    model = load(folders("deepseek_v3"), "deepseek_v3")
    forward = SlotForward(model, 2, LENGTH)
    forward._probe_decode(None)
    forward.cache.values = {layer: values.clone() for layer, values in forward.cache.values.items()}
    forward.use_native(native.build)
    assert forward.decoder == "transformers"
    assert "are not latents of 32 elements in bf16 with turned keys behind them" in caplog.text


def reference_config(folder):
    return transformers.AutoConfig.from_pretrained(folder)


@torch.inference_mode()
def test_the_engine_takes_it_and_falls_back(folders, monkeypatch, caplog):
    caplog.set_level("INFO")
    model = load(folders("mixtral"), "mixtral")
    forward = SlotForward(model, 2, LENGTH)
    forward.use_native(native.build)
    assert forward.decoder == "native"
    assert isinstance(model.lm_head, KTLinear)
    wrong = SlotForward(model, 2, LENGTH)
    monkeypatch.setattr(native, "_window", lambda parts, layer: 1)
    wrong.use_native(native.build)
    assert wrong.decoder == "transformers"
    assert "decode stays with transformers: the native decoder's logits differ" in caplog.text


@torch.inference_mode()
def test_what_it_does_not_know_is_said(folders):
    cache = SlotForward(tiny_model("cohere2_moe"), 1, 8).cache
    assert native.build(tiny_model("cohere2_moe"), cache) == "the native decoder does not know cohere2_moe"
    assert "needs a model in bfloat16" in native.build(tiny_model("mixtral"), cache)
    assert "experts of layer 0 are not all on our kernels" in native.build(tiny_model("mixtral", torch.bfloat16), cache)
    assert "clip_qkv=2.0" in native.build(tiny_model("olmoe", torch.bfloat16, clip_qkv=2.0), cache)
    assert "gelu" in native.build(tiny_model("llama", torch.bfloat16, hidden_act="gelu"), cache)
    strange = load(folders("llama"), "llama")
    strange.model.layers[1].self_attn.extra = torch.nn.Identity()
    assert native.build(strange, cache) == "the native decoder does not know extra of the attention"
    normed = load(folders("llama"), "llama")
    normed.model.norm = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
    assert "LayerNorm is no RMS norm" in native.build(normed, cache)


@torch.inference_mode()
def test_calls_that_cannot_be_are_refused(folders):
    forward = native_forward(load(folders("llama"), "llama"), slots=2, context=16)
    forward.prefill(0, [1, 2, 3])
    forward.prefill(1, [4])
    decode = forward._native
    for slots, tokens, positions, message in [
        ([2], [1], [0], "slot 2 of row 0 is not in 0..1"),
        ([0, 1], [1, -1], [3, 1], "token -1 of row 1"),
        ([0], [1], [16], "position 16 of row 0 is not in 0..15"),
        ([0, 0], [1, 1], [3, 4], "slot 0 comes twice"),
        ([0, 1, 0], [1, 1, 1], [3, 1, 4], "3 tokens in one call"),
    ]:
        with pytest.raises(ValueError, match=message):
            decode(slots, tokens, positions)
    assert decode([], [], []).shape == (0, 320)


def test_parts_that_do_not_fit_are_named(folders):
    parts = native._take_apart(load(folders("llama"), "llama"))
    spec = _core.DecoderSpec(
        hidden=64,
        vocabulary=320,
        slots=1,
        max_len=8,
        max_batch=1,
        eps=1e-6,
        embedding=parts.embedding.data_ptr(),
        final_norm=parts.final_norm,
        head=parts.head.kt_linear,
    )
    with pytest.raises(ValueError, match="add_block comes first"):
        spec.set_mlp(gate=parts.head.kt_linear, up=parts.head.kt_linear, down=parts.head.kt_linear)
    spec.add_block(attention_norm=parts.final_norm, ffn_norm=parts.final_norm[:5].contiguous())
    with pytest.raises(ValueError, match="block 0: ffn_norm has 5 elements; it must have 64"):
        _core.Decoder(parts.runtime.pool, spec)
