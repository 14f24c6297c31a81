"""Logits over slots, or over a family's own cache, are those of a forward without any cache."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: the engine was not tested")

import torch
from engine_cases import WINDOW, random_prompt, tiny_model

from kt_kernel.engine import attention, latents
from kt_kernel.engine.forward import OwnCacheForward, SlotForward, open_forward, relative_error
from kt_kernel.engine.rope import pin_frequencies
from kt_kernel.engine.rows import Rows, set_rows

SLOT_FAMILIES = [
    "mixtral",  # a window
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "gpt_oss",  # sinks; windows in every other layer
    "glm4_moe",
    "deepseek_v2",  # MLA: the cache has latents; rotary embeddings as complex numbers
    "deepseek_v3",
    "glm4_moe_lite",
    "granitemoe",
    "minimax_m2",
    "gemma4_text",  # windows, layers that share keys, two depths of heads
    "gemma2",  # softcap
    "cohere2_moe",
    "llama4_text",  # chunked attention
    "mimo_v2_flash",
]
STATE_FAMILIES = ["qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "granitemoehybrid", "jamba"]
LENGTH = 40
TOLERANCE = 2e-5  # of the spread of logits, in f32; a key too many or too few changes them by 0.1 and more


def expected_logits(model, tokens: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def run_ragged(forward: SlotForward, texts: list[list[int]], starts: list[int], pieces: list[int]) -> dict:
    """(text, position) -> logits: prompts of different lengths in pieces, then all texts together."""
    logits = {}
    for slot, (text, start) in enumerate(zip(texts, starts, strict=True)):
        done = 0
        for piece in [*pieces, start]:
            last = min(done + piece, start)
            if last > done:
                logits[slot, last - 1] = forward.prefill(slot, text[done:last])
                done = last
    for step in range(LENGTH):
        live = [slot for slot, text in enumerate(texts) if starts[slot] + step < len(text)]
        if not live:
            break
        positions = [starts[slot] + step for slot in live]
        rows = forward.decode(live, [texts[slot][at] for slot, at in zip(live, positions, strict=True)], positions)
        logits |= {(slot, at): row for slot, at, row in zip(live, positions, rows, strict=True)}
    return logits


@torch.inference_mode()
@pytest.mark.parametrize("family", SLOT_FAMILIES)
def test_slots_give_the_logits_of_a_forward_without_cache(family):
    model = tiny_model(family)
    texts = [random_prompt(LENGTH, seed) for seed in range(3)]
    expected = [expected_logits(model, text) for text in texts]
    forward = open_forward(model, slots=4, context=LENGTH)
    assert isinstance(forward, SlotForward)
    assert WINDOW < LENGTH // 2
    logits = run_ragged(forward, texts, starts=[5, 33, 18], pieces=[3, 16])
    assert max(at for _, at in logits) == LENGTH - 1
    errors = [relative_error(row[None], expected[slot][at][None]) for (slot, at), row in logits.items()]
    assert max(errors) < TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_a_key_too_many_is_noticed(family, monkeypatch):
    """The control: the same comparison with one slot's length, or the window, off by one."""
    model = tiny_model(family)
    text = random_prompt(LENGTH, 1)
    expected = expected_logits(model, text)
    forward = SlotForward(model, 1, LENGTH + 1)
    forward.prefill(0, text[:20])
    forward.cache.lengths[0] = 21
    assert relative_error(forward.decode([0], [text[20]], [21]), expected[20:21]) > 100 * TOLERANCE
    if family == "deepseek_v3":
        return
    forward.keep(0, 0)
    keys = attention.Pattern._keys

    def one_more(self, first, last, groups, device):
        if self.reach is not None and last == first + 1:
            return max(0, first - self.reach), None
        return keys(self, first, last, groups, device)

    monkeypatch.setattr(attention.Pattern, "_keys", one_more)
    forward.prefill(0, text[:20])
    assert relative_error(forward.decode([0], [text[20]], [20]), expected[20:21]) > 100 * TOLERANCE


@torch.inference_mode()
def test_attention_of_another_kind_is_refused():
    """The engine then runs the model on its own cache."""
    x = torch.zeros(1, 2, 3, 8)
    for kind in ({"is_causal": False}, {"position_bias": x}):
        with pytest.raises(ValueError, match="attention 'kt'"):
            attention.attend(None, x, x, x, None, **kind)
    with pytest.raises(ValueError, match="outside of a step"):
        attention.attend(None, x, x, x, None, is_causal=True, dropout=0.0)
    set_rows(Rows((0,), (0,), 3))
    try:
        assert attention.attend(None, x, x, x, attention.mask())[0].shape == (1, 3, 2, 8)
        with pytest.raises(ValueError, match="the model changes its attention mask"):
            attention.attend(None, x, x, x, attention.mask()[..., :1])
        with pytest.raises(ValueError, match="takes no padding mask"):
            attention.mask(attention_mask=x)
    finally:
        set_rows(None)


@torch.inference_mode()
def test_queries_in_many_blocks_are_those_in_one(monkeypatch):
    for family in ("mixtral", "gpt_oss"):
        model = tiny_model(family)
        text = random_prompt(LENGTH, 1)
        expected = expected_logits(model, text)
        monkeypatch.setattr(attention, "BLOCK_ROWS", 6)
        monkeypatch.setattr(attention, "BLOCK_SCORES", 4 * LENGTH * 3)
        forward = SlotForward(model, 1, LENGTH)
        assert relative_error(forward.prefill(0, text)[None], expected[-1:]) < TOLERANCE


@torch.inference_mode()
def test_masks_of_a_long_prompt_stay_small(monkeypatch):
    """No mask, and no table of scores, grows with the square of the prompt."""
    largest = 0
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, **options):
        nonlocal largest
        largest = max(largest, attn_mask.numel() if attn_mask is not None else 0)
        return original(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model = tiny_model("qwen3_moe", max_position_embeddings=8192)
    SlotForward(model, 1, 8192).prefill(0, random_prompt(8192, 1))
    assert 0 < largest <= attention.BLOCK_ROWS * 8192


@torch.inference_mode()
@pytest.mark.parametrize(
    "make", [lambda model: SlotForward(model, 1, LENGTH), lambda model: OwnCacheForward(model, LENGTH)]
)
def test_logits_are_made_only_where_they_are_wanted(make):
    model = tiny_model("qwen3_moe")
    text = random_prompt(LENGTH, 1)
    expected = expected_logits(model, text)
    rows = []
    model.lm_head.register_forward_hook(lambda _, args, output: rows.append(output.shape[1]))
    forward = make(model)
    assert forward.prefill(0, text[:30], n_logits=0).shape == (0,)
    assert relative_error(forward.prefill(0, text[30:])[None], expected[-1:]) < TOLERANCE
    assert rows == [0, 1]


@torch.inference_mode()
def test_a_slot_is_cut_back_and_copied():
    model = tiny_model("gpt_oss")
    text, other = random_prompt(LENGTH, 1), random_prompt(LENGTH, 2)
    forward = SlotForward(model, 3, LENGTH)
    forward.prefill(0, text[:30])
    forward.prefill(1, other)
    assert forward.keep(0, 12) == 12
    mixed = text[:12] + other[:20]
    assert relative_error(forward.prefill(0, mixed[12:])[None], expected_logits_of(model, mixed)) < TOLERANCE
    assert forward.copy(1, 2, 25)
    copied = other[:25] + text[:5]
    assert relative_error(forward.prefill(2, copied[25:])[None], expected_logits_of(model, copied)) < TOLERANCE
    with pytest.raises(ValueError, match="slot 0 holds 32 tokens, not 33"):
        forward.copy(0, 2, 33)
    with pytest.raises(ValueError, match="slot 1 holds 40 tokens of at most 40: no room for 1"):
        forward.decode([1], [0], [40])


def expected_logits_of(model, tokens: list[int]) -> torch.Tensor:
    """Of the last token; without cache, and so without the rows of a step."""
    stock = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return expected_logits(model, tokens)[-1:]
    finally:
        model.set_attn_implementation(stock)


@torch.inference_mode()
def test_memory_is_taken_as_tokens_come():
    """1 TB of keys and values may be reserved; a small prompt takes little of it."""
    model = tiny_model("qwen3_moe")
    forward = SlotForward(model, 16, 1 << 20)
    before = resident_bytes()
    forward.prefill(3, random_prompt(64, 1))
    assert forward.cache.bytes_per_token * 16 << 20 > 8e9
    assert resident_bytes() - before < 200e6


@torch.inference_mode()
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latents_are_expanded_for_many_queries(family, monkeypatch):
    """Pieces of 3 and single tokens attend to latents, those of 16 and more to what they expand to."""
    monkeypatch.setattr(latents, "EXPANDED_FROM", 10)
    model = tiny_model(family, kv_lora_rank=32, qk_rope_head_dim=8, head_dim=8)
    text = random_prompt(LENGTH, 1)
    expected = expected_logits(model, text)
    forward = SlotForward(model, 1, LENGTH)
    depths = []
    attend = attention._attend_row

    def watched(query, *others):
        depths.append(query.shape[-1])
        return attend(query, *others)

    monkeypatch.setattr(attention, "_attend_row", watched)
    logits = run_ragged(forward, [text], starts=[35], pieces=[3, 16, 3])
    errors = [relative_error(row[None], expected[at][None]) for (_, at), row in logits.items()]
    assert max(errors) < TOLERANCE
    kept, expanded = 32 + 8, 16 + 8
    assert depths[:9:2] == [kept, expanded, kept, expanded, kept]
    model.set_attn_implementation("eager")  # without a step nothing is kept
    torch.testing.assert_close(expected_logits(model, text), expected)


@torch.inference_mode()
def test_latents_of_slots_are_not_expanded():
    """Those of all slots would be 100 GB here."""
    model = tiny_model("deepseek_v3")
    texts = [random_prompt(LENGTH, seed) for seed in range(2)]
    expected = torch.stack([expected_logits(model, text)[-1] for text in texts])
    forward = SlotForward(model, 16, 1 << 20)
    before = resident_bytes()
    for slot, text in zip((14, 3), texts, strict=True):
        forward.prefill(slot, text[:-1])
    got = forward.decode([14, 3], [text[-1] for text in texts], [LENGTH - 1] * 2)
    assert relative_error(got, expected) < TOLERANCE
    assert resident_bytes() - before < 200e6
    assert forward.cache.bytes_per_token == 2 * 4 * (32 + 16)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@torch.inference_mode()
@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_families_with_state_run_one_request_at_a_time(family):
    model = tiny_model(family)
    text = random_prompt(LENGTH, 1)
    expected = expected_logits(model, text)
    forward = open_forward(model, slots=4, context=LENGTH)
    assert isinstance(forward, OwnCacheForward)
    assert forward.slots == 1
    logits = [forward.prefill(0, text[:20])]
    logits += [forward.decode([0], [text[at]], [at])[0] for at in range(20, LENGTH)]
    assert relative_error(torch.stack(logits), expected[19:]) < 1e-3
    assert forward.keep(0, LENGTH) == (0 if forward.whole_prompts else LENGTH)
    assert forward.keep(0, LENGTH - 1) == 0
    again = forward.prefill(0, text[:20])
    torch.testing.assert_close(again, logits[0])


@torch.inference_mode()
def test_a_model_that_slots_get_wrong_runs_on_its_own_cache(monkeypatch, caplog):
    monkeypatch.setattr(SlotForward, "prefill", lambda self, slot, tokens, n_logits=1: torch.zeros(320))
    with caplog.at_level("INFO", logger="kt_kernel.engine.forward"):
        forward = open_forward(tiny_model("qwen3_moe"), slots=2, context=LENGTH)
    assert isinstance(forward, OwnCacheForward)
    assert "qwen3_moe runs one request at a time: many requests at once" in caplog.text
    monkeypatch.setattr(OwnCacheForward, "prefill", lambda self, slot, tokens, n_logits=1: torch.zeros(320))
    with pytest.raises(RuntimeError, match="qwen3_moe cannot be run with a cache: many requests at once"):
        open_forward(tiny_model("qwen3_moe"), slots=2, context=LENGTH)


@torch.inference_mode()
def test_one_wrong_slot_is_enough_to_refuse_slots(monkeypatch):
    decode = SlotForward.decode

    def wrong_second(self, slots, tokens, positions):
        logits = decode(self, slots, tokens, positions)
        logits[1:] = logits[1:].flip(-1)
        return logits

    monkeypatch.setattr(SlotForward, "decode", wrong_second)
    assert isinstance(open_forward(tiny_model("qwen3_moe"), slots=2, context=LENGTH), OwnCacheForward)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [8.0] * 8,
    "short_mscale": 1.0,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 32,
}


@torch.inference_mode()
@pytest.mark.parametrize("family", ["phimoe", "qwen3_moe"])
def test_frequencies_do_not_depend_on_the_longest_text(family):
    """Beyond 32 tokens longrope takes other factors, for all rows of a forward."""
    model = tiny_model(family, rope_parameters=LONGROPE, max_position_embeddings=64)
    long, short = random_prompt(LENGTH, 1), random_prompt(12, 2)
    expected = expected_logits(model, long)
    assert pin_frequencies(model, 64) == 1
    forward = SlotForward(model, 2, 64)
    forward.prefill(0, long[:20])
    logits = [forward.prefill(0, long[20:38])]
    alone = [forward.prefill(1, short), forward.decode([1], [5], [12])[0]]
    forward.keep(1, 12)
    beside = forward.decode([0, 1], [long[38], 5], [38, 12])
    torch.testing.assert_close(beside[1], alone[1], rtol=1e-4, atol=1e-4)
    logits.append(beside[0])
    assert relative_error(torch.stack(logits), expected[37:39]) < TOLERANCE


@torch.inference_mode()
def test_usual_frequencies_are_left_alone():
    assert pin_frequencies(tiny_model("gemma4_text"), 64) == 0


class Twin:
    """A native decoder that computes what transformers does."""

    def __init__(self, model, cache, factor: float = 1.0):
        self.forward = SlotForward(model, cache.slots, cache.max_len)
        self.cache, self.factor, self.calls = cache, factor, 0

    def __call__(self, slots, tokens, positions):
        self.calls += 1
        self.forward.cache.keys, self.forward.cache.values = self.cache.keys, self.cache.values
        for slot, position in zip(slots, positions, strict=True):
            self.forward.cache.lengths[slot] = position
        rows, self.cache._rows = self.cache._rows, None
        logits = self.forward.decode(slots, tokens, positions)
        self.cache._rows = rows
        return logits * torch.linspace(1, self.factor, logits.shape[1])


@torch.inference_mode()
def test_a_native_decoder_is_used_if_it_agrees(caplog):
    caplog.set_level("INFO", logger="kt_kernel.engine.forward")
    model = tiny_model("qwen3_moe")
    text = random_prompt(LENGTH, 1)
    forward = SlotForward(model, 2, LENGTH)
    forward.use_native(lambda *_: "no such family")
    assert "decode stays with transformers: no such family" in caplog.text
    forward.use_native(lambda model, cache: Twin(model, cache, factor=3.0))
    assert "the native decoder's logits differ by" in caplog.text
    forward.use_native(lambda *_: lambda slots, tokens, positions: torch.zeros(0)[1])
    assert "the native decoder failed: index 1" in caplog.text
    assert forward.decoder == "transformers"

    fresh = SlotForward(model, 2, LENGTH)
    fresh.use_native(lambda _, cache: f"{len(cache.keys)} layers have keys")
    assert "decode stays with transformers: 2 layers have keys" in caplog.text

    twin = Twin(model, forward.cache)
    forward.use_native(lambda *_: twin)
    assert forward.decoder == "native"
    twin.calls = 0
    forward.prefill(1, text[:20])
    logits = [forward.decode([1], [text[at]], [at])[0] for at in range(20, LENGTH)]
    assert twin.calls == LENGTH - 20
    assert forward.cache.lengths == [0, LENGTH]
    model.set_attn_implementation("eager")
    assert relative_error(torch.stack(logits), expected_logits(model, text)[20:]) < TOLERANCE
