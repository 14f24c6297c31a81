"""One answer while it comes: its text, and the times at which it came."""

import time
from dataclasses import dataclass, field

from kt_kernel.chat.server import Piece, Usage
from kt_kernel.cli.language import t


@dataclass
class Answer:
    """`first` and `last` are when text came first and last; pieces stand for tokens where the server counts none."""

    started: float = field(default_factory=time.monotonic)
    content: str = ""
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    pieces: int = 0
    usage: Usage | None = None
    finish: str | None = None

    def take(self, piece: Piece) -> None:
        self.content += piece.content
        self.usage = piece.usage or self.usage
        # [DONE] stands for a stop, and must not hide the reason that came before.
        self.finish = self.finish or piece.finish
        if piece.content or piece.reasoning:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.pieces += 1

    def end(self) -> None:
        self.ended = time.monotonic()

    def timings(self, streamed: bool) -> str:
        """Total time, time to the first token, time per token behind it, and tokens in and out."""
        ended = self.ended or time.monotonic()
        parts = [t("Total {seconds} s", seconds=f"{ended - self.started:.2f}")]
        tokens = self.usage.completion_tokens if self.usage else self.pieces
        if streamed and self.first is not None:
            parts.append(t("TTFT {seconds} s", seconds=f"{self.first - self.started:.2f}"))
            if tokens > 1 and self.last > self.first:
                each = (self.last - self.first) / (tokens - 1)
                milliseconds, rate = f"{1e3 * each:.1f}", f"{1 / each:.1f}"
                parts.append(t("TPOT {milliseconds} ms ({rate} tokens/s)", milliseconds=milliseconds, rate=rate))
        if self.usage:
            parts.append(t("In {tokens}", tokens=self.usage.prompt_tokens))
            parts.append(t("Out {tokens}", tokens=tokens))
        elif streamed:
            parts.append(t("Out about {tokens}", tokens=tokens))
        return " · ".join(parts)
