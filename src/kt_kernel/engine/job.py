"""A request on its way: from rows of logits to events."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kt_kernel.engine.api import Event, Finish, Request, TokenLogprob, Usage
from kt_kernel.engine.sampling import Sampler, log_probabilities
from kt_kernel.engine.text import ModelText, StopStrings, TextStream

log = logging.getLogger(__name__)


@dataclass
class _Spoken:
    """A token whose probability has not been told yet, and where its text begins in that of the answer."""

    logprob: TokenLogprob
    start: int


class Job:
    """Created by submit; everything but `cancel` happens on the engine's thread."""

    def __init__(
        self,
        request: Request,
        on_event: Callable[[Event], None],
        text: ModelText,
        max_tokens: int,
        end_tokens: frozenset[int],
    ):
        self.request = request
        self.max_tokens = max_tokens
        self.cancelled = False
        self.ended: Event | None = None  # the last event, which goes out once the slot is free
        self.cached_tokens = 0
        self.n_generated = 0
        self.last_token = -1
        self._on_event = on_event
        self._text = text
        self._end_tokens = end_tokens
        self._sampler = Sampler(request.sampling, request.prompt)
        self._stream = TextStream(text, skip_special_tokens=not request.special_text)
        self._stops = StopStrings(request.stop)
        self._received = 0  # characters that came from the stream
        self._sent = 0  # characters that went out
        self._spoken: list[_Spoken] = []

    def cancel(self) -> None:
        self.cancelled = True

    def accept(self, logits: np.ndarray) -> None:
        """Chooses the next token and tells its text, unless it is the last: then `ended` is there."""
        token = self._sampler.sample(logits)
        self.last_token = token
        self.n_generated += 1
        if token in self._end_tokens:
            self.end("stop")
            return
        start = self._received
        text = self._stream.push(token)
        self._received += len(text)
        if self.request.logprobs is not None:
            self._spoken.append(_Spoken(self._logprob(logits, token), start))
        text = self._stops.push(text)
        if self._stops.found:
            self._spoken = [spoken for spoken in self._spoken if spoken.start < self._sent + len(text)]
            self.ended = Event(text, self._take_logprobs(), "stop", self._usage())
        elif self.n_generated >= self.max_tokens:
            self.end("length", text)
        elif text:
            self._send(Event(text, self._take_logprobs()))

    def end(self, finish: Finish, text: str = "", error: str | None = None) -> None:
        if finish in ("stop", "length"):
            text += self._stops.flush()
        self.ended = Event(text, self._take_logprobs(), finish, self._usage(), error)

    def tell_end(self) -> None:
        self._send(self.ended)

    def _usage(self) -> Usage:
        return Usage(len(self.request.prompt), self.cached_tokens, self.n_generated)

    def _send(self, event: Event) -> None:
        self._sent += len(event.text)
        try:
            self._on_event(event)
        except Exception:  # the server's fault, and no other request's concern
            log.exception("a request's on_event failed; the request is cancelled")
            self.cancelled = True

    def _logprob(self, logits: np.ndarray, token: int) -> TokenLogprob:
        own, top = log_probabilities(logits, token, self.request.logprobs or 0)
        named = tuple((other, self._text.token_bytes(other), value) for other, value in top)
        return TokenLogprob(token, self._text.token_bytes(token), own, named)

    def _take_logprobs(self) -> tuple[TokenLogprob, ...]:
        taken = tuple(spoken.logprob for spoken in self._spoken)
        self._spoken = []
        return taken
