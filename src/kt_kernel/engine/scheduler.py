"""What the engine does next. One step: prefill one chunk of one prompt, decode one token of every running answer.

So running answers wait for one chunk at most, and prompts are served in the order they came. Nothing here knows of
threads.
"""

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import torch

from kt_kernel.engine.api import Finish
from kt_kernel.engine.chunks import ChunkPlan
from kt_kernel.engine.forward import Forward
from kt_kernel.engine.job import Job

log = logging.getLogger(__name__)


@dataclass
class Slot:
    index: int
    tokens: list[int] = field(default_factory=list)  # whose keys it holds
    job: Job | None = None
    last_use: int = 0

    @property
    def prefilling(self) -> bool:
        return self.job is not None and len(self.tokens) < len(self.job.request.prompt)

    @property
    def decoding(self) -> bool:
        return self.job is not None and not self.prefilling


@dataclass
class Counts:
    """Since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0


class Scheduler:
    def __init__(self, forward: Forward, chunks: ChunkPlan):
        self.forward = forward
        self.chunks = chunks
        self.slots = [Slot(index) for index in range(forward.slots)]
        self.counts = Counts()
        self._admitted: deque[Slot] = deque()  # slots whose prompt is not done, oldest first
        self._clock = 0

    @property
    def n_free(self) -> int:
        return sum(slot.job is None for slot in self.slots)

    @property
    def n_running(self) -> int:
        return len(self.slots) - self.n_free

    def admit(self, job: Job) -> None:
        """Gives the job a free slot, with as much of its prompt as some slot has computed already."""
        self.counts.prompt_tokens += len(job.request.prompt)
        if job.max_tokens == 0:
            self.end(job, "length")
            return
        try:
            slot, reused = self._place(job.request.prompt)
        except Exception as error:
            log.error("a request found no slot", exc_info=error)
            self.end(job, "error", f"{type(error).__name__}: {error}")
            return
        slot.tokens = list(job.request.prompt[:reused])
        slot.job = job
        job.cached_tokens = reused
        self.counts.cached_tokens += reused
        self._admitted.append(slot)

    def step(self) -> None:
        """One chunk of the oldest prompt, then one token of every answer."""
        self.drop_cancelled()
        if self._admitted:
            self._prefill(self._admitted[0])
        if decoding := [slot for slot in self.slots if slot.decoding]:
            self._decode(decoding)

    def drop_cancelled(self) -> None:
        for slot in self.slots:
            if slot.job is not None and slot.job.cancelled:
                self._finish(slot, "cancelled")

    def cancel_all(self) -> None:
        for slot in self.slots:
            if slot.job is not None:
                slot.job.cancel()
        self.drop_cancelled()

    def fail_all(self, error: BaseException) -> None:
        for slot in self.slots:
            if slot.job is not None:
                self._fail(slot, error)

    def _place(self, prompt: tuple[int, ...]) -> tuple[Slot, int]:
        """The slot to use and how many tokens of the prompt it holds then."""
        self._clock += 1
        free = [slot for slot in self.slots if slot.job is None]
        oldest = min(free, key=lambda slot: (bool(slot.tokens), slot.last_use))
        common = {slot.index: self._common(slot.tokens, prompt) for slot in self.slots}
        best = max(self.slots, key=lambda slot: (common[slot.index], slot.job is None, -slot.last_use))
        length = common[best.index]
        target = best if best.job is None and self._worth_taking(best, length) else oldest
        target.last_use = self._clock
        target.tokens = []  # until it is known what it holds
        if target is not best and not (length and self.forward.copy(best.index, target.index, length)):
            length = common[target.index]
        return target, self.forward.keep(target.index, length)

    def _worth_taking(self, slot: Slot, length: int) -> bool:
        """A slot of which less than half would be kept belongs to another conversation: its start is copied instead."""
        return 2 * length >= len(slot.tokens) and length > 0

    def _common(self, tokens: list[int], prompt: tuple[int, ...]) -> int:
        """How many tokens can be reused: up to a cut, and never the last, whose logits are wanted."""
        limit = min(len(tokens), len(prompt) - 1)
        length = next((i for i in range(limit) if tokens[i] != prompt[i]), limit)
        if self.forward.can_go_back:
            return self.chunks.last_cut(length)
        return length if length == len(tokens) else 0

    def _prefill(self, slot: Slot) -> None:
        job = slot.job
        prompt = job.request.prompt
        first = len(slot.tokens)
        last = min(self.chunks.next_cut(first), len(prompt))
        start = time.perf_counter()
        try:
            logits = self.forward.prefill(slot.index, prompt[first:last], n_logits=int(last == len(prompt)))
        except Exception as error:
            self._fail(slot, error)
            return
        self.counts.prefill_seconds += time.perf_counter() - start
        slot.tokens += prompt[first:last]
        if last == len(prompt):
            self._admitted.popleft()
            self._accept(slot, logits)

    def _decode(self, slots: list[Slot]) -> None:
        start = time.perf_counter()
        try:
            logits = self._decode_rows(slots)
        except Exception as error:
            if len(slots) == 1:
                self._fail(slots[0], error)
                return
            # One of them is to blame: each by itself tells which.
            log.warning("a decode of %d requests failed (%s); each is tried by itself", len(slots), error)
            for slot in slots:
                self._decode([slot])
            return
        self.counts.decode_seconds += time.perf_counter() - start
        self.counts.decode_steps += 1
        for slot, row in zip(slots, logits, strict=True):
            slot.tokens.append(slot.job.last_token)
            self._accept(slot, row)

    def _decode_rows(self, slots: list[Slot]) -> torch.Tensor:
        return self.forward.decode(
            [slot.index for slot in slots],
            [slot.job.last_token for slot in slots],
            [len(slot.tokens) for slot in slots],
        )

    def _accept(self, slot: Slot, logits: torch.Tensor) -> None:
        try:
            slot.job.accept(logits.numpy())
        except Exception as error:
            self._fail(slot, error)
            return
        self.counts.completion_tokens += 1
        if slot.job.ended is not None:
            self._release(slot)

    def end(self, job: Job, finish: Finish, error: str | None = None) -> None:
        """Of a job that has no slot."""
        job.end(finish, error=error)
        self._tell_end(job)

    def _finish(self, slot: Slot, finish: Finish, error: str | None = None) -> None:
        slot.job.end(finish, error=error)
        self._release(slot)

    def _fail(self, slot: Slot, error: BaseException) -> None:
        log.error("a request failed", exc_info=error)
        slot.tokens = []  # and so nothing of it is kept for the next
        self._finish(slot, "error", f"{type(error).__name__}: {error}")

    def _release(self, slot: Slot) -> None:
        """Before the end is told: who hears of it finds the slot free and the counts right."""
        if slot in self._admitted:
            self._admitted.remove(slot)
        job, slot.job = slot.job, None
        self._tell_end(job)

    def _tell_end(self, job: Job) -> None:
        self.counts.finished[job.ended.finish] += 1
        job.tell_end()
