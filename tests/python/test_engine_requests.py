"""The engine as the server uses it: many requests, cancels, errors, prefixes. Tiny models, real threads."""

import random
import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: the engine was not tested")

import torch
from engine_cases import Answer, answer, engine_of, greedy, random_prompt, tiny_engine, tiny_model

from kt_kernel.engine.api import QueueFullError, Request, RequestError, Sampling
from kt_kernel.engine.forward import OwnCacheForward, SlotForward


class Watched(SlotForward):
    """Counts calls, can be held up, and fails where a test wants it to."""

    def __init__(self, model=None, slots: int = 4, context: int = 128):
        super().__init__(model if model is not None else tiny_model("qwen3_moe"), slots, context)
        self.calls: list[tuple[str, tuple[int, ...], int]] = []  # kind, slots, tokens of each
        self.gate = threading.Event()
        self.gate.set()
        self.poison: set[int] = set()  # tokens that no step survives

    def _run(self, slots, tokens, n_logits=1):
        assert self.gate.wait(60)
        self.calls.append(("decode" if len(tokens[0]) == 1 else "prefill", tuple(slots), len(tokens[0])))
        if self.poison & {token for row in tokens for token in row}:
            raise FloatingPointError("a poisoned token")
        return super()._run(slots, tokens, n_logits)


def holding(forward: Watched, one: Answer):
    """Passes events on; after the first one the model stands still until the gate is opened."""

    def on_event(event):
        if not one.events:
            forward.gate.clear()
        one(event)

    return on_event


@pytest.fixture
def watched():
    with torch.inference_mode():
        forward = Watched()
    engine = engine_of(forward)
    yield engine, forward
    forward.gate.set()
    engine.close()


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine(slots=8)
    yield engine
    engine.close()


def idle(engine) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == 0


def wait_until(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


def reference_tokens(model, prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


# What comes back


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_tokens_are_those_of_a_plain_loop(family):
    model = tiny_model(family)
    expected = reference_tokens(model, random_prompt(21, 1), 12)
    engine = tiny_engine(model)
    try:
        found = answer(engine, greedy(random_prompt(21, 1), 12))
        assert found.tokens == expected
        assert found.last.finish == "length"
        usage = found.last.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (21, 0, 12)
    finally:
        engine.close()


def test_32_requests_at_once_get_the_tokens_they_get_alone(engine):
    """Shared beginnings, different lengths: also with reuse of prefixes, nothing depends on the others."""
    start = random_prompt(30, 0)
    requests = [greedy(start[: 3 * (i % 10)] + random_prompt(1 + 2 * i, i), 5 + i % 7) for i in range(32)]
    alone = [answer(engine, request) for request in requests]
    together = [Answer() for _ in requests]
    threads = [threading.Thread(target=engine.submit, args=pair) for pair in zip(requests, together, strict=True)]
    for thread in threads:
        thread.start()
    for thread, found in zip(threads, together, strict=True):
        thread.join()
        found.wait()
    assert [found.tokens for found in together] == [found.tokens for found in alone]
    assert [found.text for found in together] == [found.text for found in alone]
    wait_until(lambda: idle(engine))


def test_a_seed_gives_the_same_answer_whatever_else_runs(engine):
    sampling = Sampling(temperature=1.5, top_p=0.95, seed=11)
    request = Request(tuple(random_prompt(9, 1)), 20, sampling, ignore_eos=True, logprobs=0)
    alone = answer(engine, request)
    noise = [Answer() for _ in range(6)]
    for i, found in enumerate(noise):
        engine.submit(replace(greedy(random_prompt(5 + i, i), 30), sampling=Sampling(temperature=2.0)), found)
    assert answer(engine, request).tokens == alone.tokens
    assert answer(engine, replace(request, sampling=replace(sampling, seed=12))).tokens != alone.tokens
    for found in noise:
        found.wait()


def test_an_answer_ends_at_an_end_token():
    model = tiny_model("qwen3_moe")
    prompt = random_prompt(10, 3)
    tokens = reference_tokens(model, prompt, 8)
    end = tokens[4]
    n = tokens.index(end) + 1
    engine = tiny_engine(model, end_tokens=frozenset([end]))
    try:
        request = replace(greedy(prompt, 8), ignore_eos=False)
        found = answer(engine, request)
        assert found.last.finish == "stop"
        assert found.last.usage.completion_tokens == n
        assert found.tokens == tokens[: n - 1]  # the end itself is no text
        assert answer(engine, greedy(prompt, 8)).tokens == tokens
        stopped = answer(engine, greedy(prompt, 8, stop_tokens=(tokens[2],)))
        assert (stopped.last.finish, stopped.tokens) == ("stop", tokens[: tokens.index(tokens[2])])
    finally:
        engine.close()


def test_an_answer_ends_before_a_stop_string(engine):
    request = greedy(random_prompt(10, 3), 40)
    whole = answer(engine, request).text
    stop = whole[7:10]
    found = answer(engine, replace(request, stop=("never seen", stop)))
    assert found.text == whole[: whole.index(stop)]
    assert found.last.finish == "stop"
    assert found.last.usage.completion_tokens < 40
    assert len(found.tokens) <= found.last.usage.completion_tokens
    unfinished = answer(engine, replace(request, stop=(whole[-2:] + " never seen",)))
    assert (unfinished.text, unfinished.last.finish) == (whole, "length")  # what was held back comes at the end


def test_logprobs_come_with_the_text_of_their_tokens(engine):
    request = replace(greedy(random_prompt(10, 3), 12), logprobs=3)
    found = answer(engine, request)
    entries = [entry for event in found.events for entry in event.logprobs]
    assert len(entries) == 12
    for entry in entries:
        assert entry.token == entry.top[0][0]  # greedy
        assert entry.logprob == entry.top[0][2] <= 0
        assert [len(entry.top), sorted(entry.top, key=lambda other: -other[2])] == [3, list(entry.top)]
    text = b"".join(entry.text for entry in entries).decode(errors="replace")
    assert text.startswith(found.text[:1])
    assert answer(engine, replace(request, logprobs=None)).tokens == []


def test_max_tokens_is_cut_at_the_context(engine):
    found = answer(engine, greedy(random_prompt(120, 1), 1000))
    assert found.last.finish == "length"
    assert found.last.usage.completion_tokens == 8
    assert answer(engine, greedy(random_prompt(120, 1), None)).tokens == found.tokens
    assert answer(engine, greedy(random_prompt(127, 1), 5)).last.usage.completion_tokens == 1
    nothing = answer(engine, greedy(random_prompt(5, 1), 0))
    assert (nothing.last.finish, nothing.last.usage.completion_tokens) == ("length", 0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (greedy([]), "the prompt is empty"),
        (greedy(random_prompt(128, 1)), "the prompt has 128 tokens; .* the context of 128"),
        (greedy([3, 320]), "the prompt has token 320: the vocabulary has 320"),
        (greedy([3], -1), "max_tokens is -1"),
        (replace(greedy([3]), logprobs=101), "logprobs is 101: it must be at least 0 and at most 100"),
        (replace(greedy([3]), sampling=Sampling(top_p=2)), "top_p is 2"),
        (replace(greedy([3]), stop=("x", "")), "a stop string is empty"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(engine, request_, message):
    with pytest.raises(RequestError, match=message):
        engine.submit(request_, Answer())


# Prefixes


def test_a_prefix_is_reused_and_gives_the_same_tokens():
    model = tiny_model("gpt_oss")
    prompt = random_prompt(37, 1)
    engine = tiny_engine(model, slots=2, chunk=8)
    try:
        first = answer(engine, greedy(prompt, 10))
        again = answer(engine, greedy(prompt, 10))
        assert (first.last.usage.cached_tokens, again.last.usage.cached_tokens) == (0, 32)
        assert again.tokens == first.tokens
        turn = prompt + first.tokens + random_prompt(9, 2)  # the next turn of the same conversation
        found = answer(engine, greedy(turn, 10))
        assert found.last.usage.cached_tokens == 40  # of 46 that are known, up to a cut
        branch = prompt[:20] + random_prompt(20, 3)
        branched = answer(engine, greedy(branch, 10))
        assert branched.last.usage.cached_tokens == 16
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.cached_tokens) == (37 + 37 + 56 + 40, 32 + 40 + 16)
    finally:
        engine.close()
    model.set_attn_implementation("eager")
    assert first.tokens == reference_tokens(model, prompt, 10)
    assert found.tokens == reference_tokens(model, turn, 10)
    assert branched.tokens == reference_tokens(model, branch, 10)


def test_reuse_changes_no_bit():
    """bf16, where another cut of the prompt shows: a prefix is reused up to a cut for this reason."""
    model = tiny_model("qwen3_moe", torch.bfloat16)
    prompt = random_prompt(45, 1)
    engine = tiny_engine(model, slots=2, chunk=16)
    try:
        alone = answer(engine, greedy(prompt, 6))
        answer(engine, greedy(prompt[:40] + random_prompt(20, 2), 6))
        again = answer(engine, greedy(prompt, 6))
    finally:
        engine.close()
    assert again.last.usage.cached_tokens == 32
    assert [event.logprobs for event in again.events] == [event.logprobs for event in alone.events]


def test_the_last_token_of_a_prompt_is_always_computed():
    engine = tiny_engine(slots=1, chunk=8)
    try:
        prompt = random_prompt(16, 1)
        first = answer(engine, greedy(prompt, 5))
        again = answer(engine, greedy(prompt, 5))
        assert again.last.usage.cached_tokens == 8
        assert again.tokens == first.tokens
    finally:
        engine.close()


def test_a_short_beginning_is_copied_and_the_conversation_stays(watched):
    engine, forward = watched
    system = random_prompt(16, 0)
    long = system + random_prompt(60, 1)
    first = answer(engine, greedy(long, 4))
    other = answer(engine, greedy(system + random_prompt(10, 2), 4))
    assert other.last.usage.cached_tokens == 16
    again = answer(engine, greedy(long, 4))
    assert again.last.usage.cached_tokens == 72
    assert again.tokens == first.tokens
    assert len({slots for kind, slots, _ in forward.calls if kind == "prefill"}) == 2


def test_a_prefix_is_taken_from_a_slot_that_runs(watched):
    engine, _ = watched
    prompt = random_prompt(33, 0)
    running = Answer()
    ticket = engine.submit(greedy(prompt, 90), running)
    assert running.started.wait(30)
    beside = answer(engine, greedy(prompt, 4))
    assert beside.last.usage.cached_tokens == 32
    ticket.cancel()
    assert running.wait().tokens[:4] == beside.tokens


# Order


def test_running_answers_never_wait_for_more_than_one_chunk(watched):
    """Between two decodes of a running answer lies at most one call of the model, whatever is prefilled."""
    engine, forward = watched
    running = Answer()
    ticket = engine.submit(greedy(random_prompt(5, 1), 100), holding(forward, running))
    assert running.started.wait(30)
    others = [Answer() for _ in range(3)]
    for i, found in enumerate(others):
        engine.submit(greedy(random_prompt(70 + 10 * i, i), 4), found)
    forward.gate.set()
    for found in others:
        found.wait()
    ticket.cancel()
    running.wait()
    calls = forward.calls[1:]
    mine = next(slots for kind, slots, _ in forward.calls if kind == "prefill")[0]
    between = 0
    for kind, slots, n_tokens in calls:
        if kind == "decode" and mine in slots:
            between = 0
            continue
        between += 1
        assert kind == "prefill"
        assert between <= 1
        assert n_tokens <= 8
    prefills = sum(kind == "prefill" for kind, _, _ in calls)
    assert prefills == 9 + 10 + 12  # 70, 80 and 90 tokens in chunks of 8


def test_requests_are_served_in_order_and_the_queue_is_limited():
    with torch.inference_mode():
        forward = Watched(slots=1)
    engine = engine_of(forward, max_queue=3)
    try:
        forward.gate.clear()
        order = []
        found = [Answer() for _ in range(4)]
        engine.submit(greedy([1, 2, 3], 2), found[0])
        wait_until(lambda: engine.stats().running == 1)
        for i, one in enumerate(found[1:], 1):
            engine.submit(greedy([1, 2, 3 + i], 2), lambda event, i=i, one=one: (order.append(i), one(event)))
        with pytest.raises(QueueFullError, match="3 requests wait already, as many as may"):
            engine.submit(greedy([1, 2, 3], 2), Answer())
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.slots) == (1, 3, 1)
        forward.gate.set()
        for one in found:
            one.wait()
        assert order == sorted(order)
        answer(engine, greedy([1], 1))
    finally:
        forward.gate.set()
        engine.close()


def test_a_burst_fits_into_free_slots_and_queue():
    engine = tiny_engine(slots=4, max_queue=0)
    try:
        found = [Answer() for _ in range(4)]
        for i, one in enumerate(found):
            engine.submit(greedy([i + 1], 3), one)
        for one in found:
            one.wait()
    finally:
        engine.close()


# Cancel, errors, end


def test_cancel_frees_the_slot_in_every_phase():
    with torch.inference_mode():
        forward = Watched(slots=1)
    engine = engine_of(forward)
    try:
        decoding, waiting = Answer(), Answer()
        ticket = engine.submit(greedy(random_prompt(5, 1), 120), holding(forward, decoding))
        other = engine.submit(greedy(random_prompt(5, 2), 120), waiting)
        assert decoding.started.wait(30)
        other.cancel()
        ticket.cancel()
        ticket.cancel()
        forward.gate.set()
        assert waiting.wait().last.finish == "cancelled"
        assert waiting.last.usage.completion_tokens == 0
        assert decoding.wait().last.finish == "cancelled"
        assert decoding.last.usage.completion_tokens < 120
        wait_until(lambda: idle(engine))

        prefilling = Answer()
        forward.gate.clear()
        ticket = engine.submit(greedy(random_prompt(100, 3), 5), prefilling)
        wait_until(lambda: engine.stats().running == 1)
        before = len(forward.calls)
        ticket.cancel()
        forward.gate.set()
        assert prefilling.wait().last.finish == "cancelled"
        assert len(forward.calls) <= before + 1
        ticket.cancel()
        assert answer(engine, greedy(random_prompt(5, 1), 3)).last.finish == "length"
        assert engine.stats().finished == {"cancelled": 3, "length": 1}
    finally:
        forward.gate.set()
        engine.close()


def test_an_error_ends_the_requests_concerned_and_no_other(watched):
    engine, forward = watched
    healthy = [Answer() for _ in range(2)]
    requests = [greedy(random_prompt(6, i), 60) for i in range(2)]
    for request, one in zip(requests, healthy, strict=True):
        engine.submit(request, one)
    assert all(one.started.wait(30) for one in healthy)
    forward.poison = {300}
    prompt = answer(engine, greedy([1, 300, 2], 4))
    assert prompt.last.finish == "error"
    assert prompt.last.error == "FloatingPointError: a poisoned token"

    forward.poison = {301}  # chosen by a bias, it fails in a decode of all
    sampling = Sampling(temperature=0, logit_bias={301: 1e6})
    step = answer(engine, replace(greedy([1, 2], 4), sampling=sampling))
    assert (step.last.finish, step.last.usage.completion_tokens) == ("error", 1)
    forward.poison = set()
    for request, one in zip(requests, healthy, strict=True):
        assert one.wait().last.finish == "length"
        assert one.tokens == answer(engine, request).tokens
    assert engine.stats().finished["error"] == 2


def test_a_copy_that_fails_leaves_no_wrong_keys(watched):
    """A slot whose keys were half overwritten is not taken for what it held before."""
    engine, forward = watched
    system = random_prompt(16, 0)
    longs = [*(random_prompt(70, seed) for seed in range(1, 4)), system + random_prompt(60, 4)]
    first = [answer(engine, greedy(long, 4)) for long in longs]  # fills all slots
    copy = forward.cache.copy

    def fails(source, target, length):
        copy(source, target, length)
        raise MemoryError("no room")

    forward.cache.copy = fails
    found = answer(engine, greedy(system + random_prompt(40, 9), 4))
    assert (found.last.finish, found.last.error) == ("error", "MemoryError: no room")
    forward.cache.copy = copy
    assert [answer(engine, greedy(long, 4)).tokens for long in longs] == [one.tokens for one in first]


def test_logits_that_are_no_numbers_end_the_request(watched):
    engine, forward = watched
    run = forward._run
    forward._run = lambda *arguments: run(*arguments) * float("nan")
    found = answer(engine, greedy([1, 2], 4))
    assert found.last.finish == "error"
    assert "the model's logits are not finite" in found.last.error
    forward._run = run
    assert answer(engine, greedy([1, 2], 4)).last.finish == "length"


def test_a_callback_that_fails_cancels_its_request(watched):
    engine, _ = watched

    def fails(event):
        raise ConnectionError("gone")

    engine.submit(greedy([1, 2], 100), fails)
    wait_until(lambda: engine.stats().finished.get("cancelled") == 1)
    assert answer(engine, greedy([1, 2], 4)).last.finish == "length"


def test_close_cancels_and_refuses_what_comes_later():
    with torch.inference_mode():
        forward = Watched(slots=1)
    engine = engine_of(forward)
    found = [Answer() for _ in range(3)]
    for one in found:
        engine.submit(greedy([1, 2, 3], 120), holding(forward, one))
    assert found[0].started.wait(30)
    threading.Timer(0.1, forward.gate.set).start()
    engine.close()
    assert [one.wait(0.1).last.finish for one in found] == ["cancelled"] * 3
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit(greedy([1], 1), Answer())
    engine.close()
    assert engine.stats().running == 0


def test_an_engine_can_be_closed_from_its_own_thread():
    engine = tiny_engine(slots=1)
    engine.submit(greedy([1, 2, 3], 50), lambda event: engine.close())
    engine._thread.join(30)
    assert not engine._thread.is_alive()


def test_a_family_with_state_continues_its_own_conversation():
    model = tiny_model("qwen3_next")
    expected = reference_tokens(model, random_prompt(11, 1), 6)
    with torch.inference_mode():
        engine = engine_of(OwnCacheForward(model, 128))
    try:
        found = [Answer() for _ in range(2)]
        for one in found:
            engine.submit(greedy(random_prompt(11, 1), 6), one)
        assert [one.wait().tokens for one in found] == [expected] * 2
        turn = random_prompt(11, 1) + expected + random_prompt(5, 2)
        continued = answer(engine, greedy(turn, 6))
        assert continued.last.usage.cached_tokens == 16  # the last token of an answer is never run
        assert continued.tokens == reference_tokens(model, turn, 6)
    finally:
        engine.close()


def test_1000_requests_with_random_cancels_leave_nothing_behind():
    with torch.inference_mode():
        forward = Watched(slots=8, context=48)
    engine = engine_of(forward, max_queue=1000)
    rng = random.Random(1)
    try:
        serve_and_cancel(engine, rng, 100)
        before = resident_bytes()
        found = serve_and_cancel(engine, rng, 1000)
        assert idle(engine)
        finished = engine.stats().finished
        assert sum(finished.values()) == 1100
        assert finished["cancelled"] > 50
        assert finished["length"] > 300
        assert all(sum(event.finish is not None for event in one.events) == 1 for one in found)
        del found
        assert resident_bytes() - before < 30e6
        assert answer(engine, greedy([1, 2, 3], 3)).last.finish == "length"
    finally:
        engine.close()


def serve_and_cancel(engine, rng: random.Random, n: int) -> list[Answer]:
    found = []
    for _ in range(n):
        one = Answer()
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 20))]
        ticket = engine.submit(replace(greedy(prompt, rng.randrange(1, 4)), logprobs=None), one)
        if rng.random() < 0.3:
            threading.Timer(rng.random() * 0.01, ticket.cancel).start()
        found.append(one)
        while engine.stats().waiting > 20:
            time.sleep(0.0005)
    for one in found:
        one.wait()
    wait_until(lambda: idle(engine))
    return found


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
