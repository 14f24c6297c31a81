"""POST /v1/completions."""

from collections.abc import Sequence

from kt_kernel.engine.api import Event, Request
from kt_kernel.server import rules
from kt_kernel.server.errors import invalid
from kt_kernel.server.job import Envelope, finite, readable
from kt_kernel.server.protocol import CompletionRequest
from kt_kernel.server.service import Service

_DEFAULT_TOKENS = 16  # OpenAI's: without a limit few base models would ever stop


async def prepare_completion(service: Service, asked: CompletionRequest) -> "CompletionJob":
    """Checks the request and makes tokens of its prompts."""
    prompts = _prompts(asked.prompt)
    rules.check_choices(service.limits, asked, len(prompts))
    logprobs = asked.logprobs
    if logprobs is not None:
        rules.check_top_logprobs(service.limits, logprobs, "logprobs")
        if asked.echo:
            raise invalid("'echo' with 'logprobs' is not supported: tokens of prompts have no probabilities", "echo")
    text = service.engine.text
    tokens, echoed = [], []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens.append(await service.with_text(text.encode, prompt))
        else:
            rules.check_tokens(service.engine, prompt, "prompt")
            tokens.append(prompt)
        if asked.echo:
            echoed.append(prompt if isinstance(prompt, str) else await service.with_text(text.decode, prompt))
    max_tokens = rules.check_max_tokens(asked.max_tokens, "max_tokens")
    requests = rules.engine_requests(
        service.engine,
        service.limits,
        asked,
        tokens,
        max_tokens=_DEFAULT_TOKENS if max_tokens is None else max_tokens,
        logprobs=logprobs,
    )
    return CompletionJob(asked, service.engine.name, requests, len(prompts), echoed)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("'prompt' is empty", "prompt")
    kind = type(prompt[0])
    if any(type(one) is not kind for one in prompt):
        raise invalid("'prompt' mixes texts, token ids and lists of them", "prompt")
    return [prompt] if kind is int else list(prompt)


class CompletionChoice:
    def __init__(self, index: int, echoed: str, with_logprobs: bool):
        self._index = index
        self._texts = [echoed] if echoed else []
        self._offset = len(echoed)
        self._with_logprobs = with_logprobs
        self._logprobs: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self._finish: str | None = None

    def opening(self) -> list[dict[str, object]]:
        """The prompt, if it is echoed."""
        return [self._choice("".join(self._texts), None)] if self._texts else []

    def take(self, event: Event) -> list[dict[str, object]]:
        self._texts.append(event.text)
        self._finish = event.finish
        logprobs = self._take_logprobs(event) if self._with_logprobs and event.logprobs else None
        if not (event.text or event.finish or logprobs):
            return []
        return [self._choice(event.text, logprobs)]

    def whole(self) -> dict[str, object]:
        return self._choice("".join(self._texts), self._logprobs if self._with_logprobs else None)

    def _take_logprobs(self, event: Event) -> dict[str, list]:
        new: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for found in event.logprobs:
            token = readable(found.text)
            new["tokens"].append(token)
            new["token_logprobs"].append(finite(found.logprob))
            new["top_logprobs"].append({readable(text): finite(logprob) for _, text, logprob in found.top})
            new["text_offset"].append(self._offset)
            self._offset += len(token)
        for name, values in new.items():
            self._logprobs[name] += values
        return new

    def _choice(self, text: str, logprobs: object) -> dict[str, object]:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": self._finish}


class CompletionJob:
    def __init__(
        self, asked: CompletionRequest, model: str, requests: Sequence[Request], prompts: int, echoed: Sequence[str]
    ):
        self.requests = requests
        self.stream = bool(asked.stream)
        self.wants_usage = asked.wants_usage
        self.choices_per_prompt = len(requests) // prompts
        self._choices = [
            CompletionChoice(i, echoed[i // self.choices_per_prompt] if echoed else "", asked.logprobs is not None)
            for i in range(len(requests))
        ]
        self._envelope = Envelope("cmpl", "text_completion", model)

    def opening(self) -> Sequence[dict[str, object]]:
        return [self._envelope.around([chunk]) for choice in self._choices for chunk in choice.opening()]

    def take(self, index: int, event: Event) -> Sequence[dict[str, object]]:
        return [self._envelope.around([chunk]) for chunk in self._choices[index].take(event)]

    def whole(self, usage: dict[str, object]) -> dict[str, object]:
        return {**self._envelope.around([choice.whole() for choice in self._choices]), "usage": usage}

    def usage_chunk(self, usage: dict[str, object]) -> dict[str, object]:
        return {**self._envelope.around([]), "usage": usage}
