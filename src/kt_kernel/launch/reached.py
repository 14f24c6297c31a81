"""What an engine that has just started reaches: one short answer that nobody asked for.

The answer runs on an engine that is idle. A request that comes meanwhile shares a step with it, at most: the answer is
cancelled when the engine tells of another one.
"""

import sys
import threading
import time
from collections.abc import Callable

from kt_kernel.cli import printing
from kt_kernel.cli.language import t
from kt_kernel.engine.api import Engine, Request, Sampling

_PROMPT_TOKENS, _TOKENS = 32, 48
_LONGEST_S = 5.0
_POLL_S = 0.005
# A second for whoever has waited for the server.
_PATIENCE_S = 1.0
_POOR = 0.75  # of what was promised, below which there must be a reason


def watch(engine: Engine, tell: Callable[[float], None], patience_s: float = _PATIENCE_S) -> threading.Thread:
    """Measures in the background; `tell` gets tokens per second, or is not called."""

    def measure() -> None:
        time.sleep(patience_s)
        rate = measure_decode(engine)
        if rate is not None:
            tell(rate)

    thread = threading.Thread(target=measure, name="kt-reached", daemon=True)
    thread.start()
    return thread


def measure_decode(engine: Engine) -> float | None:
    """Tokens per second of one answer; None if the engine has, or gets, something else to do."""
    before = engine.stats()
    if before.running or before.waiting or sum(before.finished.values()) or engine.context_length < 2 * _PROMPT_TOKENS:
        return None
    ended = threading.Event()

    def event(found) -> None:
        if found.finish is not None:
            ended.set()

    step = max(1, engine.vocabulary_size // (4 * _PROMPT_TOKENS))
    prompt = tuple(engine.vocabulary_size // 4 + i * step for i in range(_PROMPT_TOKENS))
    request = Request(
        prompt=prompt,
        max_tokens=min(_TOKENS, engine.context_length - _PROMPT_TOKENS),
        sampling=Sampling(temperature=0.0),
        ignore_eos=True,
    )
    try:
        ticket = engine.submit(request, event)
    except (RuntimeError, ValueError):  # closed, or full: not the time for it
        return None
    alone, end = True, time.perf_counter() + _LONGEST_S
    while alone and not ended.wait(_POLL_S) and time.perf_counter() < end:
        now = engine.stats()
        alone = now.running + now.waiting <= 1
    ticket.cancel()
    after = engine.stats()
    steps, seconds = after.decode_steps - before.decode_steps, after.decode_seconds - before.decode_seconds
    return steps / seconds if alone and steps >= _TOKENS // 4 and seconds > 0 else None


def tell(rate: float, promised: float) -> None:
    line = t(
        "reached: {rate} tokens/s of one answer, {share} % of what was promised",
        rate=printing.three_digits(rate),
        share=f"{100 * rate / promised:.0f}",
    )
    print(f"kt run: {line}", file=sys.stderr, flush=True)
    if rate < _POOR * promised:
        line = t("'kt doctor' looks for the reason")
        print(f"kt run: {line}", file=sys.stderr, flush=True)
