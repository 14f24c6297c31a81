"""An engine of the server's protocol that computes nothing: its answers follow from the prompt, at a set pace.

Tokens are bytes. A prompt that ends in `SAY text` is answered with that text, others with words that follow from the
prompt and the seed. `FAIL` in a prompt makes the engine fail behind the third token, `SLOW` makes its steps slower.
"""

import random
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kt_kernel.engine.api import Event, QueueFullError, Request, RequestError, Sampling, Stats, TokenLogprob, Usage

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "naïve", "你好", "𝄞"]
PIECE = 3  # characters of a token of an answer


class ByteText:
    def __init__(self, template: str | None):
        self.template = template
        self.declares_answers = False  # test_server_declared.py has one that does
        self.calls: list[tuple] = []  # messages, tools and template arguments as they came

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def chat(self, messages, tools=None, **template_arguments) -> list[int]:
        self.calls = [*self.calls[-9:], (messages, tools, template_arguments)]
        if any("REFUSE" in str(message["content"]) for message in messages):
            raise RequestError("the template refuses this")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        start = "assistant:<think>\n" if template_arguments.get("enable_thinking") else "assistant:"
        return self.encode("".join(lines) + start)


@dataclass
class _Live:
    request: Request
    on_event: Callable[[Event], None]
    pieces: deque[str] = field(default_factory=deque)
    tokens: int = 0
    cancelled: bool = False
    fails: bool = False
    slow: bool = False

    def cancel(self) -> None:
        self.cancelled = True


def answer_to(request: Request) -> str:
    prompt = bytes(request.prompt).decode(errors="replace")
    if "SAY " in prompt:
        return prompt.rpartition("SAY ")[2].rpartition("\nassistant:")[0].replace("\\n", "\n") or prompt[-20:]
    seed = request.sampling.seed if request.sampling.temperature > 0 else None
    chosen = random.Random(zlib.crc32(repr((prompt, seed)).encode()))
    return " ".join(chosen.choice(WORDS) for _ in range(chosen.randint(20, 40)))


class ScriptedEngine:
    def __init__(self, *, slots=4, max_queue=64, step_seconds=0.001, context_length=4096, template=None):
        self.name = "scripted"
        self.context_length = context_length
        self.vocabulary_size = 256
        self.text = ByteText(template)
        self.defaults = Sampling()
        self._slots = slots
        self._max_queue = max_queue
        self._step_seconds = step_seconds
        self._waiting: deque[_Live] = deque()
        self._live: list[_Live] = []
        self._lock = threading.Condition()
        self._closed = False
        self._finished: Counter[str] = Counter()
        self._prompt_tokens = self._completion_tokens = self._steps = 0
        self.submitted: list[Request] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> _Live:
        if len(request.prompt) >= self.context_length:
            raise RequestError("the prompt is too long")
        prompt = bytes(request.prompt)
        live = _Live(request, on_event, fails=b"FAIL" in prompt, slow=b"SLOW" in prompt)
        text = answer_to(request)
        text = text[: min((text.index(stop) for stop in request.stop if stop in text), default=len(text))]
        live.pieces.extend(text[i : i + PIECE] for i in range(0, len(text), PIECE))
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            if len(self._waiting) >= self._max_queue:
                raise QueueFullError(f"{self._max_queue} requests wait, which is as many as may")
            self.submitted = [*self.submitted[-9:], request]
            self._waiting.append(live)
            self._lock.notify()
        return live

    def stats(self) -> Stats:
        with self._lock:
            finished, running, waiting = dict(self._finished), len(self._live), len(self._waiting)
        tokens = self._prompt_tokens, 0, self._completion_tokens
        return Stats(
            running, waiting, self._slots, *tokens, finished, 0.0, self._steps * self._step_seconds, self._steps
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._closed or self._live or self._waiting):
                    self._lock.wait()
                if self._closed:
                    for live in [*self._live, *self._waiting]:
                        live.cancelled = True
                while self._waiting and (len(self._live) < self._slots or self._closed):
                    self._live.append(self._waiting.popleft())
                if self._closed and not self._live:
                    return
            time.sleep(self._step_seconds * (10 if any(live.slow for live in self._live) else 1))
            self._steps += 1
            ended = [live for live in self._live if self._step(live)]
            with self._lock:
                self._live = [live for live in self._live if live not in ended]

    def _step(self, live: _Live) -> bool:
        """One token of one request; True if it was the last."""
        if live.cancelled:
            return self._finish(live, "", "cancelled")
        if live.fails and live.tokens == 3:
            return self._finish(live, "", "error")
        piece = live.pieces.popleft() if live.pieces else ""
        live.tokens += 1
        if not live.pieces:
            return self._finish(live, piece, "stop", piece)
        if live.request.max_tokens is not None and live.tokens >= live.request.max_tokens:
            return self._finish(live, piece, "length", piece)
        live.on_event(Event(piece, self._logprobs(live, piece)))
        return False

    def _finish(self, live: _Live, text: str, finish, piece: str = "") -> bool:
        self._finished[finish] += 1
        self._prompt_tokens += len(live.request.prompt)
        self._completion_tokens += live.tokens
        usage = Usage(len(live.request.prompt), 0, live.tokens)
        error = "the script says to fail" if finish == "error" else None
        live.on_event(Event(text, self._logprobs(live, piece), finish, usage, error))
        return True

    def _logprobs(self, live: _Live, piece: str) -> tuple[TokenLogprob, ...]:
        wanted = live.request.logprobs
        if wanted is None or not piece:
            return ()
        top = tuple((i, piece.encode() + bytes([97 + i]), -1.0 - i) for i in range(wanted))
        return (TokenLogprob(1, piece.encode(), -0.5, top),)
