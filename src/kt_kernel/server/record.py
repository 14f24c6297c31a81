"""What became of one HTTP request: for the log and for the metrics."""

import time
from dataclasses import dataclass, field

from kt_kernel.engine.api import Usage
from kt_kernel.server.generation import Generation


@dataclass
class Record:
    method: str
    path: str
    status: int | None = None
    stream: bool = False
    disconnected: bool = False
    failed: bool = False  # in the middle of a stream, when the status was sent already
    reason: str | None = None  # of a failure
    started: float = field(default_factory=time.perf_counter)
    usage: list[Usage] = field(default_factory=list)
    first_token: float | None = None  # seconds
    rate: float | None = None  # tokens per second behind the first, of all choices together

    @property
    def outcome(self) -> str:
        if self.disconnected:
            return "disconnected"
        if self.failed or self.status is None or self.status >= 500:
            return "server_error"
        if self.status == 429:
            return "rejected"
        return "client_error" if self.status >= 400 else "ok"

    def take(self, generation: Generation) -> None:
        self.usage = list(generation.usages.values())
        if generation.first_token is None:
            return
        self.first_token = generation.first_token - generation.started
        behind = generation.completion_tokens - len(self.usage)
        if generation.ended is not None and behind > 0 and generation.ended > generation.first_token:
            self.rate = behind / (generation.ended - generation.first_token)

    def line(self) -> str:
        status = "disconnected" if self.disconnected else "failed" if self.failed else self.status
        words = [f"{self.method} {self.path} {status}"]
        if self.stream:
            words.append("stream")
        if self.usage:
            prompt = max(usage.prompt_tokens for usage in self.usage)
            cached = max(usage.cached_tokens for usage in self.usage)
            completion = sum(usage.completion_tokens for usage in self.usage)
            words.append(f"{prompt} ({cached} cached) -> {completion} tokens")
        if self.first_token is not None:
            words.append(f"first after {self.first_token:.2f} s")
        if self.rate is not None:
            words.append(f"{self.rate:.1f} tokens/s")
        if self.reason is not None:
            words.append(self.reason)
        words.append(f"{time.perf_counter() - self.started:.2f} s")
        return ", ".join(words)
