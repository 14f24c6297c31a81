"""What the server and the engine tell each other. Needs neither torch nor transformers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Finish = Literal["stop", "length", "cancelled", "error"]


class QueueFullError(RuntimeError):
    """As many requests wait as may; the message says how many that is."""


class RequestError(ValueError):
    """A request that this model can never serve, such as a prompt beyond its context."""


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0  # 0: the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # of the most likely token's probability
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # the same seed gives the same tokens, whatever else runs


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int | None = None  # None: up to the context's end
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()  # the text ends before the first of them
    stop_tokens: tuple[int, ...] = ()  # besides the model's own
    ignore_eos: bool = False
    special_text: bool = False  # special tokens become text too, but for the one that ends the answer
    # How many alternatives each token comes with; 0 = its own probability alone, None = nothing.
    logprobs: int | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural logarithm of probability before temperature and filters, and the most likely ones beside it."""

    token: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int  # of the prompt, taken from an earlier request
    completion_tokens: int


@dataclass(frozen=True)
class Event:
    """New text of a request, in order; the last one has `finish`. Text is whole characters and never part of a stop."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None  # with finish
    error: str | None = None  # with finish "error"


class Ticket(Protocol):
    """A request that was taken."""

    def cancel(self) -> None:
        """From any thread, at any time, also twice. The slot is free after the step that runs now."""


@dataclass(frozen=True)
class Stats:
    running: int
    waiting: int
    slots: int
    prompt_tokens: int  # these and below: since the start
    cached_tokens: int
    completion_tokens: int
    finished: Mapping[str, int]  # requests by finish
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int


class RegionParser(Protocol):
    """transformers' streaming parser. Events are dicts: type is region_open, region_chunk (with text, and dirty if it
    means something only as a whole) or region_close (with value), field is what of a message the region is."""

    def feed(self, text: str) -> Sequence[Mapping[str, object]]: ...

    def finalize(self) -> tuple[Mapping[str, object], Sequence[Mapping[str, object]]]: ...


class Text(Protocol):
    """The tokenizer and templates of the model. The server calls it from one thread of its own."""

    template: str | None  # the text of the chat template: the server reads from it how answers are written
    declares_answers: bool  # the tokenizer has a response template, which says so better

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Special tokens included."""

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        **template_arguments: object,
    ) -> list[int]:
        """The prompt for an answer to the messages. RequestError: the template refuses them, or there is none."""

    def answer_parser(self, prompt: Sequence[int], tools: Sequence[Mapping[str, object]] | None = None) -> RegionParser:
        """For one answer; only where declares_answers."""


class Engine(Protocol):
    name: str
    context_length: int
    vocabulary_size: int
    text: Text
    defaults: Sampling  # what generation_config.json asks for where a request says nothing

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> Ticket:
        """Returns at once. on_event is called on the engine's thread and must not block.

        QueueFullError, RequestError; RuntimeError once the engine is closed.
        """

    def stats(self) -> Stats: ...

    def close(self) -> None:
        """Cancels what runs and waits for its end."""
