"""The engine: a queue in front of the scheduler, and the one thread that runs it."""

import logging
import threading
from collections import deque
from collections.abc import Callable

import torch

from kt_kernel.engine import sampling
from kt_kernel.engine.api import Event, QueueFullError, Request, RequestError, Sampling, Stats, Ticket
from kt_kernel.engine.chunks import ChunkPlan
from kt_kernel.engine.forward import Forward
from kt_kernel.engine.job import Job
from kt_kernel.engine.scheduler import Scheduler
from kt_kernel.engine.text import ModelText

log = logging.getLogger(__name__)

MAX_LOGPROBS = 100


class SlotEngine:
    """The Engine of api.py."""

    def __init__(
        self,
        name: str,
        forward: Forward,
        text: ModelText,
        chunks: ChunkPlan,
        *,
        vocabulary_size: int,
        end_tokens: frozenset[int] = frozenset(),
        defaults: Sampling | None = None,
        max_queue: int = 256,
    ):
        self.name = name
        self.context_length = forward.context
        self.vocabulary_size = vocabulary_size
        self.text = text
        self.defaults = defaults or Sampling()
        self.max_queue = max_queue
        self.forward = forward
        self._end_tokens = end_tokens
        self._scheduler = Scheduler(forward, chunks)
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kt-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> Ticket:
        job = self._job(request, on_event)
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine is closed")
            # A free slot will take one of those that wait as soon as the step that runs now has ended.
            if len(self._waiting) >= self.max_queue + self._scheduler.n_free:
                raise QueueFullError(f"{len(self._waiting)} requests wait already, as many as may: try again later")
            self._waiting.append(job)
            self._changed.notify()
        return _JobTicket(self, job)

    def stats(self) -> Stats:
        counts = self._scheduler.counts
        with self._changed:
            waiting = len(self._waiting)
        return Stats(
            running=self._scheduler.n_running,
            waiting=waiting,
            slots=self.forward.slots,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            completion_tokens=counts.completion_tokens,
            finished=dict(counts.finished),
            prefill_seconds=counts.prefill_seconds,
            decode_seconds=counts.decode_seconds,
            decode_steps=counts.decode_steps,
        )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _job(self, request: Request, on_event: Callable[[Event], None]) -> Job:
        length = len(request.prompt)
        if not length:
            raise RequestError("the prompt is empty: it needs at least one token")
        if length >= self.context_length:
            raise RequestError(
                f"the prompt has {length} tokens; with at least one of an answer it must fit into the context of "
                f"{self.context_length}"
            )
        if not all(0 <= token < self.vocabulary_size for token in request.prompt):
            bad = next(token for token in request.prompt if not 0 <= token < self.vocabulary_size)
            raise RequestError(f"the prompt has token {bad}: the vocabulary has {self.vocabulary_size}")
        if request.max_tokens is not None and request.max_tokens < 0:
            raise RequestError(f"max_tokens is {request.max_tokens}: it must be at least 0")
        if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
            raise RequestError(f"logprobs is {request.logprobs}: it must be at least 0 and at most {MAX_LOGPROBS}")
        if "" in request.stop:
            raise RequestError("a stop string is empty")
        sampling.check(request.sampling, self.vocabulary_size)
        room = self.context_length - length
        max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        ends = frozenset(request.stop_tokens) | (frozenset() if request.ignore_eos else self._end_tokens)
        return Job(request, on_event, self.text, max_tokens, ends)

    def _cancel(self, job: Job) -> None:
        with self._changed:
            job.cancel()
            self._changed.notify()

    def _run(self) -> None:
        with torch.inference_mode():
            while self._turn():
                pass

    def _turn(self) -> bool:
        """Waits for work and does one step of it; False once the engine is closed and everything has its end."""
        with self._changed:
            while not (self._closed or self._waiting or self._scheduler.n_running):
                self._changed.wait()
            closed = self._closed
            ended = [job for job in self._waiting if closed or job.cancelled]
            admitted = self._take(ended)
        for job in ended:
            self._scheduler.end(job, "cancelled")
        if closed:
            self._scheduler.cancel_all()
            return False
        try:
            for job in admitted:
                self._scheduler.admit(job)
            self._scheduler.step()
        except Exception as error:  # of ours: what a model raises is caught where it is called
            self._scheduler.fail_all(error)
        return True

    def _take(self, ended: list[Job]) -> list[Job]:
        """Removes the ended ones from the queue, and returns those that free slots take now."""
        for job in ended:
            self._waiting.remove(job)
        return [self._waiting.popleft() for _ in range(min(self._scheduler.n_free, len(self._waiting)))]


class _JobTicket:
    def __init__(self, engine: SlotEngine, job: Job):
        self._engine = engine
        self._job = job

    def cancel(self) -> None:
        self._engine._cancel(self._job)
