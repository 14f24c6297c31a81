"""What a server is started with."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """A request beyond one of these gets a 4xx answer that names the limit."""

    body_bytes: int = 8 << 20
    body_seconds: float = 30.0  # from the request's head to the end of its body
    max_tokens: int | None = None  # of one answer; a request that wants more gets this many
    choices: int = 16  # n times the number of prompts
    stop_strings: int = 16
    stop_chars: int = 256
    biased_tokens: int = 1024
    top_logprobs: int = 20
    tools: int = 128
    in_flight: int = 256  # requests whose answers are not finished, those that wait included


@dataclass(frozen=True)
class Settings:
    api_key: str | None = None
    cors: tuple[str, ...] = ()  # origins of web pages that may call; "*" for all
    hosts: tuple[str, ...] = ()  # names under which the server is called; empty: any
    strict_model: bool = False  # refuse names of other models instead of answering to any
    ping_seconds: float = 10.0  # silence after which a stream gets a comment, so that proxies keep it
    grace_seconds: float = 30.0  # what running requests get when the server is told to stop
    limits: Limits = field(default_factory=Limits)
