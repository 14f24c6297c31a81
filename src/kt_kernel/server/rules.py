"""From the fields of a request to how the engine samples, each held against its range."""

import math
from collections.abc import Mapping, Sequence

from kt_kernel.engine.api import Engine, Request, Sampling
from kt_kernel.server.errors import invalid
from kt_kernel.server.protocol import Common
from kt_kernel.server.settings import Limits

# name -> smallest, largest
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(2**63), 2**64 - 1),
}


def engine_requests(
    engine: Engine,
    limits: Limits,
    asked: Common,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    special_text: bool = False,
) -> list[Request]:
    """n requests for each prompt, in the order of the choices."""
    count = check_choices(limits, asked, len(prompts))
    sampling = _sampling(engine, limits, asked)
    stop, stop_tokens = _stop(engine, limits, asked)
    requests = []
    for prompt in prompts:
        allowed = _allowed_tokens(engine, limits, len(prompt), max_tokens)
        for i in range(count):
            requests.append(
                Request(
                    prompt=tuple(prompt),
                    max_tokens=allowed,
                    sampling=_seeded(sampling, asked.seed, i),
                    stop=stop,
                    stop_tokens=stop_tokens,
                    ignore_eos=bool(asked.ignore_eos),
                    special_text=special_text,
                    logprobs=logprobs,
                )
            )
    return requests


def check_choices(limits: Limits, asked: Common, prompts: int) -> int:
    """n; the number of answers is bounded before anything is computed for them."""
    count = 1 if asked.n is None else asked.n
    if count < 1:
        raise invalid(f"'n' is {count}; legal: 1 to {limits.choices}", "n")
    if count * prompts > limits.choices:
        many = f"{prompts} prompts with n = {count} are" if prompts > 1 else f"n = {count} is"
        raise invalid(f"{many} more than the {limits.choices} answers that one request may have", "n")
    return count


def check_top_logprobs(limits: Limits, count: int, name: str) -> int:
    if not 0 <= count <= limits.top_logprobs:
        raise invalid(f"'{name}' is {count}; legal: 0 to {limits.top_logprobs}", name)
    return count


def check_max_tokens(value: int | None, name: str) -> int | None:
    if value is not None and value < 1:
        raise invalid(f"'{name}' is {value}; it must be at least 1", name)
    return value


def check_tokens(engine: Engine, tokens: Sequence[int], name: str) -> None:
    # min and max, since a prompt may have millions of tokens and the event loop waits.
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < engine.vocabulary_size:
            raise invalid(f"'{name}': token {token} is not in 0 to {engine.vocabulary_size - 1}", name)


def _allowed_tokens(engine: Engine, limits: Limits, prompt_tokens: int, wanted: int | None) -> int:
    """As many as were asked for, the context has room for, and the server allows."""
    if prompt_tokens == 0:
        raise invalid("the prompt is empty", "prompt")
    room = engine.context_length - prompt_tokens
    if room < 1:
        raise invalid(
            f"the prompt has {prompt_tokens} tokens; with one token of an answer that is more than the context of "
            f"{engine.context_length}",
            "messages",
            "context_length_exceeded",
        )
    return min(number for number in (room, wanted, limits.max_tokens) if number is not None)


def _sampling(engine: Engine, limits: Limits, asked: Common) -> Sampling:
    for name, (low, high) in _RANGES.items():
        value = getattr(asked, name)
        # Written so that NaN fails too.
        if value is not None and not low <= value <= high:
            raise invalid(f"'{name}' is {value}; legal: {low} to {high}", name)
    default = engine.defaults

    def chosen(name: str):
        value = getattr(asked, name)
        return getattr(default, name) if value is None else value

    return Sampling(
        temperature=chosen("temperature"),
        top_p=chosen("top_p"),
        top_k=max(chosen("top_k"), 0),  # elsewhere -1 says all, too
        min_p=chosen("min_p"),
        repetition_penalty=chosen("repetition_penalty"),
        presence_penalty=chosen("presence_penalty"),
        frequency_penalty=chosen("frequency_penalty"),
        logit_bias=_bias(engine, limits, asked.logit_bias or {}),
    )


def _seeded(sampling: Sampling, seed: int | None, choice: int) -> Sampling:
    if seed is None:
        return sampling
    from dataclasses import replace

    return replace(sampling, seed=(seed + choice) % 2**63)


def _bias(engine: Engine, limits: Limits, bias: Mapping[str, float]) -> dict[int, float]:
    if len(bias) > limits.biased_tokens:
        raise invalid(f"'logit_bias' names {len(bias)} tokens; at most {limits.biased_tokens} may be", "logit_bias")
    found = {}
    for key, value in bias.items():
        # isdecimal() alone takes digits of other scripts, and int() hundreds of digits.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise invalid(f"'logit_bias': '{key[:40]}' is not a token id", "logit_bias")
        check_tokens(engine, [int(key)], "logit_bias")
        if not (math.isfinite(value) and -100 <= value <= 100):
            raise invalid(f"'logit_bias': {value} is not in -100 to 100", "logit_bias")
        found[int(key)] = float(value)
    return found


def _stop(engine: Engine, limits: Limits, asked: Common) -> tuple[tuple[str, ...], tuple[int, ...]]:
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    tokens = asked.stop_token_ids or []
    if len(stop) > limits.stop_strings or len(tokens) > limits.stop_strings:
        raise invalid(f"'stop' has {max(len(stop), len(tokens))} entries; at most {limits.stop_strings} may be", "stop")
    for text in stop:
        if not text or len(text) > limits.stop_chars:
            raise invalid(f"'stop': a string of {len(text)} characters; legal: 1 to {limits.stop_chars}", "stop")
    check_tokens(engine, tokens, "stop_token_ids")
    return tuple(stop), tuple(tokens)
