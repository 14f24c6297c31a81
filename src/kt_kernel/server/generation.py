"""The answers to one HTTP request: from events on the engine's thread to batches on the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from kt_kernel.engine.api import Engine, Event, Request, Ticket, Usage


class Generation:
    """One ticket for each choice. Events wait in memory for a slow reader: at most max_tokens of them for each."""

    def __init__(self, ping_seconds: float):
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._wake = asyncio.Event()
        self._signalled = False
        self._ping_seconds = ping_seconds
        self._tickets: list[Ticket] = []
        self._open: set[int] = set()
        self.started = time.perf_counter()
        self.first_token: float | None = None
        self.ended: float | None = None
        self.usages: dict[int, Usage] = {}

    def submit(self, engine: Engine, requests: Sequence[Request]) -> None:
        """All of them or none: where the engine refuses one, those before it are cancelled."""
        self._open = set(range(len(requests)))
        try:
            for index, request in enumerate(requests):
                self._tickets.append(engine.submit(request, lambda event, index=index: self._put(index, event)))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()

    async def batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """(choice, event) pairs that have come, until every choice is finished; an empty batch after long silence."""
        while self._open:
            timer = self._loop.call_later(self._ping_seconds, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()
            # Before the events are taken: what is put from now on signals again.
            self._signalled = False
            batch = []
            while self._events:
                batch.append(self._events.popleft())
            self._note(batch)
            yield batch

    def _put(self, index: int, event: Event) -> None:
        """On the engine's thread."""
        self._events.append((index, event))
        if self._signalled:
            return
        self._signalled = True
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            # The loop is closed: the server is gone, and nobody reads any more.
            self._events.clear()

    def _note(self, batch: Sequence[tuple[int, Event]]) -> None:
        if not batch:
            return
        now = time.perf_counter()
        if self.first_token is None:
            self.first_token = now
        for index, event in batch:
            if event.finish is not None:
                self._open.discard(index)
                if event.usage is not None:
                    self.usages[index] = event.usage
        if not self._open:
            self.ended = now

    @property
    def completion_tokens(self) -> int:
        return sum(usage.completion_tokens for usage in self.usages.values())
