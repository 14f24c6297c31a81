"""open_engine: from a folder on disk to answers."""

import json
import logging
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: the engine was not tested")

import torch
from engine_cases import Answer, answer, greedy, random_prompt, tiny_model, tiny_tokenizer

from kt_kernel.engine.api import Sampling
from kt_kernel.engine.load import default_sampling, open_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "tiny-qwen", tiny_model("qwen3_moe", torch.bfloat16))


def saved(path, model):
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


def test_a_folder_becomes_an_engine_that_answers(folder, caplog):
    caplog.set_level(logging.INFO, logger="kt_kernel.engine")
    engine = open_engine(folder, slots=3, context=96, threads=1)
    try:
        assert (engine.name, engine.context_length, engine.vocabulary_size) == ("tiny-qwen", 96, 320)
        assert engine.stats().slots == 3
        prompt = engine.text.chat([{"role": "user", "content": "on the roof"}])
        first = answer(engine, greedy(prompt, 12))
        assert first.last.finish == "length"
        assert answer(engine, greedy(prompt, 12)).tokens == first.tokens
    finally:
        engine.close()
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("qwen3_moe loaded in") for line in lines)
    assert "12 linears in bf16" in lines  # attention has 4, twice, the first layer a dense MLP of 3, and the head
    assert "3 slots of 96 tokens: up to 0.0 GB of keys and values" in lines
    assert any(line.startswith("decode by native; prompts in pieces of") for line in lines)


def test_experts_run_on_our_kernels(folder):
    engine = open_engine(folder, slots=1, context=32, threads=1, method="BF16", chunk_tokens=16)
    try:
        model = engine.forward.model
        assert model.config._experts_implementation == "kt"
        assert sum(parameter.numel() for parameter in model.parameters()) < sum(
            parameter.numel() for parameter in tiny_model("qwen3_moe").parameters()
        )
    finally:
        engine.close()


def test_logits_are_finer_than_bf16(folder):
    """Those of the same hidden states: made from f32 sums, and not rounded."""
    engine = open_engine(folder, slots=1, context=32, threads=1, chunk_tokens=16)
    engine.close()
    with torch.inference_mode():
        logits = engine.forward.prefill(0, random_prompt(10, 1))
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9


def test_torch_computes_linears_if_asked(folder, caplog):
    caplog.set_level(logging.INFO, logger="kt_kernel.engine")
    engine = open_engine(folder, slots=1, context=32, threads=1, chunk_tokens=16, linears=None)
    engine.close()
    assert "linears are computed by torch" in caplog.text
    assert "decode by transformers" in caplog.text
    assert type(engine.forward.model.lm_head) is torch.nn.Linear
    with pytest.raises(ValueError, match="weight_format 'int3' is unknown"):
        open_engine(folder, slots=1, context=32, threads=1, linears="int3")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_answers_of_bf16_models_do_not_depend_on_other_requests(tmp_path, family):
    """To the bit: the logarithms of probability of 12 requests at once are those of each alone."""
    path = saved(tmp_path / family, tiny_model(family, torch.bfloat16))
    engine = open_engine(path, slots=12, context=96, threads=1, chunk_tokens=16)
    assert engine.forward.decoder == "native"
    start = random_prompt(40, 0)
    requests = [greedy(start[: 4 * i] + random_prompt(1 + 3 * i, i), 10) for i in range(12)]
    try:
        alone = [answer(engine, request) for request in requests]
        together = [Answer() for _ in requests]
        for request, one in zip(requests, together, strict=True):
            engine.submit(request, one)
        for one in together:
            one.wait()
    finally:
        engine.close()
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens
        assert [entry for event in one.events for entry in event.logprobs] == [
            entry for event in other.events for entry in event.logprobs
        ]


def test_kimi_k2_is_deepseek_v3(tmp_path, caplog):
    """Its config has another type and names code of its own, which is not there; its latents are decoded natively."""
    caplog.set_level(logging.INFO, logger="kt_kernel.engine")
    path = saved(tmp_path / "kimi", tiny_model("deepseek_v3", torch.bfloat16))
    answers = []
    for model_type in ("deepseek_v3", "kimi_k2"):
        given = json.loads((path / "config.json").read_text()) | {"model_type": model_type}
        if model_type == "kimi_k2":
            given["auto_map"] = {"AutoConfig": "missing.DeepseekV3Config", "AutoModelForCausalLM": "missing.Model"}
        (path / "config.json").write_text(json.dumps(given))
        engine = open_engine(path, slots=2, context=64, threads=1, chunk_tokens=16, trust_remote_code=True)
        try:
            assert engine.forward.decoder == "native"
            answers.append(answer(engine, greedy(random_prompt(20, 1), 8)).tokens)
        finally:
            engine.close()
    assert answers[0] == answers[1]
    assert "kimi_k2 is deepseek_v3 for transformers" in caplog.text


def test_a_model_without_experts_is_served_too(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="kt_kernel.engine")
    engine = open_engine(saved(tmp_path / "dense", tiny_model("gemma2")), slots=1, context=32, threads=1, name="mine")
    try:
        assert engine.name == "mine"
        assert answer(engine, greedy(random_prompt(9, 1), 3)).last.finish == "length"
    finally:
        engine.close()
    assert "gemma2 has no experts: transformers computes all of it" in caplog.text


def test_a_model_that_also_sees_is_served_for_text(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="kt_kernel.engine")
    path = saved(tmp_path / "sees", tiny_model("qwen3_vl_moe", torch.bfloat16))
    engine = open_engine(path, slots=2, context=64, threads=1)
    try:
        assert engine.stats().slots == 2
        assert answer(engine, greedy(random_prompt(9, 1), 3)).last.finish == "length"
    finally:
        engine.close()
    assert "qwen3_vl_moe is served for text only" in caplog.text


def test_a_model_that_generates_nothing_is_refused(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match="vit is no model that generates text"):
        open_engine(tmp_path)


def test_a_family_with_state_is_served_one_request_at_a_time(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="kt_kernel.engine")
    path = saved(tmp_path / "hybrid", tiny_model("qwen3_next", torch.bfloat16))
    engine = open_engine(path, slots=4, context=64, threads=1)
    try:
        assert engine.stats().slots == 1
        assert answer(engine, greedy(random_prompt(9, 1), 3)).last.finish == "length"
    finally:
        engine.close()
    assert "one request at a time, of 64 tokens" in caplog.text


def test_end_tokens_and_defaults_come_from_the_generation_config(tmp_path):
    model = tiny_model("qwen3_moe", torch.bfloat16)
    path = saved(tmp_path / "model", model)
    given = {"eos_token_id": [7, 9], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(given))
    engine = open_engine(path, slots=1, context=32, threads=1, chunk_tokens=16)
    engine.close()
    assert engine._end_tokens == {7, 9, tiny_tokenizer().eos_token_id}
    assert engine.defaults == Sampling(temperature=0.6, top_p=0.95, top_k=20)


def test_defaults_without_a_generation_config(tmp_path):
    assert default_sampling(tmp_path) == Sampling()
    (tmp_path / "generation_config.json").write_text("{nonsense")
    assert default_sampling(tmp_path) == Sampling()
    (tmp_path / "generation_config.json").write_text('{"temperature": null, "top_k": "many"}')
    assert default_sampling(tmp_path) == Sampling()


def test_what_is_no_checkpoint_is_refused_before_anything_is_loaded(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder: give the folder of a checkpoint"):
        open_engine(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json: is it the folder of a checkpoint"):
        open_engine(tmp_path)
    with pytest.raises(ValueError, match="chunk_tokens is 48: it must be a power of two"):
        open_engine(folder, chunk_tokens=48)
    with pytest.raises(ValueError, match="context is 10000000: the model was made for"):
        open_engine(folder, context=10_000_000)


def test_the_interface_needs_neither_torch_nor_transformers():
    code = (
        "import sys, kt_kernel.engine.api, kt_kernel.engine.load\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
