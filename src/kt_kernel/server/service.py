"""What the endpoints share: the engine, the limits, the requests that run, and whether the server stops."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kt_kernel.engine.api import Engine, QueueFullError, Request, RequestError
from kt_kernel.server.answers.style import style_of
from kt_kernel.server.errors import ApiError, invalid, overloaded, stopping
from kt_kernel.server.generation import Generation
from kt_kernel.server.metrics import Metrics
from kt_kernel.server.settings import Settings

log = logging.getLogger("kt_kernel.server")
_R = TypeVar("_R")


class Service:
    def __init__(self, engine: Engine, settings: Settings):
        self.engine = engine
        self.settings = settings
        self.limits = settings.limits
        self.metrics = Metrics()
        self.style = style_of(engine.text.template)
        self.stopping = False
        self._running: set[Generation] = set()
        self._in_flight = 0
        # One thread: tokenizers are not made for several, and a long prompt must not hold the event loop.
        self._text = ThreadPoolExecutor(1, thread_name_prefix="kt-text")

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts a request from its head to the end of its answer."""
        if self.stopping:
            raise stopping()
        if self._in_flight >= self.limits.in_flight:
            raise overloaded(f"{self._in_flight} requests are being answered, which is as many as the server takes")
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def with_text(self, work: Callable[..., _R], *arguments: object, **named: object) -> _R:
        """Runs something that uses the tokenizer. What templates raise on messages that they were not made for is the
        request's fault."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._text, lambda: work(*arguments, **named))
        except RequestError as error:
            raise invalid(str(error)) from None
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise invalid(f"the model's tokenizer or chat template refused the request: {error}") from None

    @contextlib.contextmanager
    def generating(self, requests: Sequence[Request]) -> Iterator[Generation]:
        """Submits; whatever ends the block cancels what still runs."""
        generation = Generation(self.settings.ping_seconds)
        try:
            generation.submit(self.engine, requests)
        except QueueFullError as error:
            raise overloaded(str(error)) from None
        except RequestError as error:
            raise invalid(str(error)) from None
        except RuntimeError as error:
            raise ApiError(503, f"the engine takes no requests: {error}", code="engine_closed") from None
        self._running.add(generation)
        try:
            yield generation
        finally:
            self._running.discard(generation)
            generation.cancel()
            self._measure(generation)

    def _measure(self, generation: Generation) -> None:
        if generation.first_token is not None:
            self.metrics.first_token.add(generation.first_token - generation.started)
        if generation.ended is not None:
            self.metrics.request.add(generation.ended - generation.started)
            behind_first = max((usage.completion_tokens for usage in generation.usages.values()), default=0) - 1
            if behind_first > 0:
                self.metrics.token.add((generation.ended - generation.first_token) / behind_first)

    def stop(self) -> None:
        """No new requests from now on; those that run go on."""
        self.stopping = True

    def cancel_all(self) -> None:
        for generation in list(self._running):
            generation.cancel()

    def close(self) -> None:
        self._text.shutdown(wait=False, cancel_futures=True)
