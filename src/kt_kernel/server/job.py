"""One HTTP request on its way through the engine: what both endpoints have in common."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from kt_kernel.engine.api import Event, Request, TokenLogprob, Usage
from kt_kernel.server.errors import ApiError, stopping
from kt_kernel.server.generation import Generation
from kt_kernel.server.http import DONE, PING, sse

_LEAST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI's interface says it so


class Job(Protocol):
    """Knows how its answers are written; made once the request is checked and its prompt tokenised."""

    requests: Sequence[Request]
    stream: bool
    wants_usage: bool
    choices_per_prompt: int

    def opening(self) -> Sequence[dict[str, object]]:
        """Chunks before the first token."""

    def take(self, index: int, event: Event) -> Sequence[dict[str, object]]:
        """Notes an event of a choice and returns its chunks."""

    def whole(self, usage: dict[str, object]) -> dict[str, object]:
        """The answer in one piece, once every choice is finished."""

    def usage_chunk(self, usage: dict[str, object]) -> dict[str, object]: ...


class Envelope:
    """The fields around choices that every object of an answer has."""

    def __init__(self, prefix: str, kind: str, model: str):
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self._kind = kind
        self._model = model
        self._created = int(time.time())

    def around(self, choices: Sequence[object], kind: str | None = None) -> dict[str, object]:
        return {
            "id": self.id,
            "object": kind or self._kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


async def stream_chunks(job: Job, generation: Generation) -> AsyncIterator[bytes]:
    """The answer as server-sent events; ApiError where it fails in the middle."""
    null_usage = {"usage": None} if job.wants_usage else {}
    opening = b"".join(sse({**chunk, **null_usage}) for chunk in job.opening())
    if opening:
        yield opening
    async for batch in generation.batches():
        if not batch:
            yield PING
            continue
        out = []
        for index, event in batch:
            failure = _failure(event)
            if failure is not None:
                yield b"".join(out)
                raise failure
            out += [sse({**chunk, **null_usage}) for chunk in job.take(index, event)]
        if out:
            yield b"".join(out)
    if job.wants_usage:
        yield sse(job.usage_chunk(total_usage(generation.usages, job.choices_per_prompt)))
    yield DONE


async def whole_answer(job: Job, generation: Generation) -> dict[str, object]:
    async for batch in generation.batches():
        for index, event in batch:
            failure = _failure(event)
            if failure is not None:
                raise failure
            job.take(index, event)
    return job.whole(total_usage(generation.usages, job.choices_per_prompt))


def _failure(event: Event) -> ApiError | None:
    if event.finish == "error":
        return ApiError(500, event.error or "the engine failed", code="engine_error")
    # The server itself cancels what runs while it stops; whoever disconnected reads no events.
    return stopping() if event.finish == "cancelled" else None


def total_usage(usages: dict[int, Usage], choices_per_prompt: int) -> dict[str, object]:
    """A prompt counts once, whatever its number of answers."""
    first = [usage for index, usage in usages.items() if index % choices_per_prompt == 0]
    prompt = sum(usage.prompt_tokens for usage in first)
    completion = sum(usage.completion_tokens for usage in usages.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in first)},
    }


def readable(token: bytes) -> str:
    return token.decode(errors="replace")


def finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def chat_logprob(found: TokenLogprob) -> dict[str, object]:
    def entry(text: bytes, logprob: float) -> dict[str, object]:
        return {"token": readable(text), "logprob": finite(logprob), "bytes": list(text)}

    top = [entry(text, logprob) for _, text, logprob in found.top]
    return {**entry(found.text, found.logprob), "top_logprobs": top}
