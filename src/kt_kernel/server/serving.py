"""The server's life: a socket before the model is loaded, requests, and an orderly end."""

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kt_kernel.engine.api import Engine
from kt_kernel.server.app import create_app
from kt_kernel.server.errors import invalid
from kt_kernel.server.http import encode
from kt_kernel.server.service import Service, log
from kt_kernel.server.settings import Settings

_HEAD_SECONDS = 20.0  # a connection that has sent no whole request head by then is closed
_LAST_SECONDS = 5.0  # for answers to say that they were cut off
_CUT_OFF_SECONDS = 1.0  # for tasks to notice that nobody listens


class BindError(OSError):
    """The message says what to do."""


def bind(host: str, port: int) -> socket.socket:
    """Takes the port; connections are accepted only once the server runs."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise BindError(f"'{host}' is not an address of this machine ({error}); use --host") from None
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise BindError(f"cannot listen on {host}:{port} ({error.strerror}); use --port or --host") from None
    return found


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def base_url(bound: socket.socket) -> str:
    """Where a browser on this machine finds it."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Protocol(H11Protocol):
    """Errors below the application in OpenAI's form, and no patience with connections that never ask."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._patience = self.loop.call_later(_HEAD_SECONDS, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        # The timer would keep the connection, and all that it holds, in memory.
        self._patience.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # In the middle of an answer there is no room for another.
            self.transport.close()
            return
        body = encode(invalid("this is not a valid HTTP/1.1 request", code="invalid_http").body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()


class Server(uvicorn.Server):
    """Stops on the first signal when requests have ended or their time is over, on the second at once."""

    def __init__(self, engine: Engine, settings: Settings, on_started: Callable[[], None] | None = None):
        self._on_started = on_started
        self.service = Service(engine, settings)
        self._grace = settings.grace_seconds
        config = uvicorn.Config(
            create_app(self.service),
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=None,
        )
        super().__init__(config)

    def stop(self, at_once: bool = False) -> None:
        """From any thread. Asked a second time, running requests are cancelled."""
        at_once = at_once or self.should_exit
        self.service.stop()
        self.should_exit = True
        self.force_exit = self.force_exit or at_once

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.force_exit:
            log.warning("stopping: running requests get up to %g s; Ctrl-C again stops at once", self._grace)
        cancelling = asyncio.ensure_future(self._cancel_late())
        try:
            await super().shutdown(sockets)
        finally:
            cancelling.cancel()
            await self._cut_off()
            self.service.close()

    async def _cut_off(self) -> None:
        """Ends what is left after a stop at once, as if the clients had gone."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks), timeout=_CUT_OFF_SECONDS)

    async def _cancel_late(self) -> None:
        """Cancelled requests still say so to their clients; whoever does not listen to that is cut off."""
        await asyncio.sleep(self._grace)
        log.warning("requests that still run after %g s are cancelled", self._grace)
        self.service.cancel_all()
        await asyncio.sleep(_LAST_SECONDS)
        self.force_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises the signal again in the end; here a stop that was asked for is a success."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Nothing more: a handler may interrupt whatever holds a lock, or writes to the log.
        self.stop()

    async def main_loop(self) -> None:
        if self._on_started is not None:
            self._on_started()
        await super().main_loop()


def serve(
    engine: Engine, bound: socket.socket, settings: Settings, on_started: Callable[[], None] | None = None
) -> None:
    """Serves until a signal says to stop, then closes the engine."""
    try:
        Server(engine, settings, on_started).run(sockets=[bound])
    finally:
        engine.close()
