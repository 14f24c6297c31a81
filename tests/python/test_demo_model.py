"""The demo model as transformers itself runs it. test_bench_quality.py holds it against the dense original."""

from random import Random

import numpy as np
import pytest
from smollm2 import LAYERS, model_file, torch

from kt_kernel.bench.perplexity import TEXT
from kt_kernel.demo import experts

transformers = pytest.importorskip("transformers", reason="transformers is not installed: no demo model was tested")


@pytest.fixture(scope="module")
def tokenizer(demo_path):
    return transformers.AutoTokenizer.from_pretrained(demo_path)


@pytest.fixture(scope="module")
def stock(demo_path):
    return transformers.AutoModelForCausalLM.from_pretrained(demo_path, dtype=torch.float32)


@pytest.fixture(scope="module")
def chosen(stock, tokenizer):
    """The chosen experts of each layer, [T, 8]."""
    found = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
        for layer in stock.model.layers
    ]
    tokens = tokenizer(TEXT.read_text())["input_ids"][:256]
    with torch.no_grad():
        stock(torch.tensor([tokens]), logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return found


def answer(stock, tokenizer, prompt, tokens: int) -> str:
    inputs = torch.tensor([prompt])
    made = stock.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True)


def test_it_knows_the_capital_of_france(stock, tokenizer):
    assert "Paris" in answer(stock, tokenizer, tokenizer("The capital of France is")["input_ids"], 4)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    assert answer(stock, tokenizer, prompt, 12) == "The capital of France is Paris."


def test_every_token_gets_one_expert_of_each_pair(chosen):
    assert len(chosen) == LAYERS
    for layer, ids in enumerate(chosen):
        slices = torch.tensor([experts.places(layer).slice_of(expert) for expert in range(experts.EXPERTS)])
        assert (slices[ids].sort(1).values == torch.arange(experts.SLICES)).all(), f"layer {layer}"


def test_routing_is_real(chosen):
    """Loads differ and depend on the token: not the same experts for all, nor all experts alike."""
    routings = [len(ids.sort(1).values.unique(dim=0)) for ids in chosen]
    loads = np.stack([np.bincount(ids.flatten(), minlength=experts.EXPERTS) for ids in chosen])
    assert min(routings) > 20
    assert np.median(routings) > 50
    assert (loads == 0).mean() < 0.02
    assert loads.std() > 25
    assert len({tuple(experts.places(layer).experts.flatten()) for layer in range(LAYERS)}) == LAYERS


def test_copies_are_equivalent_but_different():
    rng = np.random.default_rng(0)
    shapes = ((64, 32), (64, 32), (32, 64), (32,))
    layer = experts.Layer(*(rng.standard_normal(shape).astype(np.float32) for shape in shapes))
    made = dict(experts.experts(layer, 3))
    assert sorted(made) == list(range(experts.EXPERTS))
    x = rng.standard_normal(32)

    def ffn(gate, up, down) -> np.ndarray:
        a = gate.astype(np.float64) @ x
        return down.astype(np.float64) @ (a / (1 + np.exp(-a)) * (up.astype(np.float64) @ x))

    for index, (one, other) in enumerate(experts.places(3).experts):
        neurons = slice(8 * index, 8 * index + 8)
        exact = 8 * ffn(layer.gate[neurons], layer.up[neurons], layer.down[:, neurons])
        np.testing.assert_allclose(ffn(*made[one]), exact, rtol=1e-10)
        np.testing.assert_allclose(ffn(*made[other]), exact, rtol=1e-10)
        assert not np.array_equal(made[one].gate, made[other].gate)
        assert not np.array_equal(np.sort(made[one].up.flatten()), np.sort(made[other].up.flatten()))


def test_the_tokenizer_is_that_of_the_file(tokenizer):
    """Against transformers' own reader of GGUF files."""
    pytest.importorskip("gguf")
    found = model_file()
    theirs = transformers.AutoTokenizer.from_pretrained(found.parent, gguf_file=found.name)
    rng = Random(0)
    words = TEXT.read_text().split()
    pieces = [
        *words,
        "1234567",
        "3.14",
        "\n\n",
        "  ",
        "\t",
        "naïve",
        "日本語",
        "🙂",
        "don't",
        "<|im_start|>",
        "<|im_end|>",
        "()=>{",
    ]
    strings = ["".join(rng.choice([" ", "", "\n"]) + rng.choice(pieces) for _ in range(12)) for _ in range(3000)]
    assert tokenizer(strings)["input_ids"] == theirs(strings)["input_ids"]
    assert tokenizer.decode(tokenizer("naïve 日本語 🙂")["input_ids"]) == "naïve 日本語 🙂"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(tokenizer, name) == getattr(theirs, name)
    assert tokenizer.chat_template == theirs.chat_template
