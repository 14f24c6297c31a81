"""The layers around the endpoints: every request ends with an answer, a count and a line; strangers do not get in."""

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kt_kernel.server.errors import ApiError
from kt_kernel.server.http import DisconnectedError, error_response
from kt_kernel.server.record import Record
from kt_kernel.server.service import Service, log

# The page is open so that it can ask for the key.
_OPEN_PATHS = frozenset({"/", "/chat.js", "/chat.css", "/health"})
_UNTOLD_PATHS = _OPEN_PATHS | {"/metrics"}  # what succeeds there is no news
_HEADER_BYTES = 32 << 10


class Shell:
    """Counts and logs. The outermost layer."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]):
        self._app = app
        self._service = service
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        record = scope["kt_record"] = Record(scope["method"], scope["path"])
        metrics = self._service.metrics

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-content-type-options", b"nosniff")]
            metrics.sent_bytes += len(message.get("body", b""))
            await send(message)

        async def counted_receive() -> Message:
            message = await receive()
            metrics.received_bytes += len(message.get("body", b""))
            return message

        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            # Names of unknown paths are the clients' own: as labels they would grow without bound.
            endpoint = record.path if record.path in self._paths else "other"
            metrics.requests[endpoint, record.outcome] += 1
            if endpoint not in _UNTOLD_PATHS or record.outcome != "ok":
                log.info("%s", _printable(record.line()))


class Errors:
    """Turns exceptions into answers. Inside the layer for other origins, which puts its headers on those too."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: Record = scope["kt_record"]
        error = await self._run(scope, receive, send, record)
        if error is not None and record.status is None:
            await error_response(error)(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send, record: Record) -> ApiError | None:
        try:
            await self._app(scope, receive, send)
        except ApiError as error:
            record.failed = record.status is not None
            record.reason = error.message if error.status >= 500 else None
            return error
        except HTTPException as error:
            return _from_starlette(error, scope)
        except DisconnectedError:
            record.disconnected = True
        except Exception:
            record.failed = record.status is not None
            log.exception("%s %s: the server failed", scope["method"], _printable(scope["path"]))
            return ApiError(500, "the server failed; its log says why", code="internal_error")
        return None


def _from_starlette(error: HTTPException, scope: Scope) -> ApiError:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{scope['path']} does not take {scope['method'][:20]}; it takes {allowed}"
        return ApiError(405, message, code="method_not_allowed", allowed=allowed)
    return ApiError(error.status_code, str(error.detail))


def _printable(text: str) -> str:
    """A path can hold line breaks and colours of terminals."""
    return "".join(c if c.isprintable() else "?" for c in text[:300])


class Gate:
    """Who may call: by name of the host, by origin of a web page, by key."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._key = service.settings.api_key
        self._cors = service.settings.cors
        self._hosts = {host.lower() for host in service.settings.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > _HEADER_BYTES:
            raise ApiError(
                431, f"the headers are larger than the limit of {_HEADER_BYTES} bytes", code="headers_too_large"
            )
        self._check_host(headers)
        self._check_origin(headers)
        if self._key is not None and scope["path"] not in _OPEN_PATHS:
            self._check_key(headers)
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """A web page whose name resolves to this machine would otherwise be let in by the browser as our own."""
        host = _host_name(headers.get("host", ""))
        if self._hosts and host not in self._hosts:
            raise ApiError(
                403,
                f"this server does not answer to the name '{host[:100]}': call it as one of "
                f"{', '.join(sorted(self._hosts))}, or start it with --allow-host",
                code="unknown_host",
            )

    def _check_origin(self, headers: Headers) -> None:
        """Browsers send requests of other pages without asking first if they look like forms."""
        origin = headers.get("origin")
        if origin is None or origin in self._cors or "*" in self._cors:
            return
        try:
            same = urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
        except ValueError:
            same = False
        if not same:
            raise ApiError(
                403, f"web pages of '{origin[:100]}' may not call this server; start it with --cors to allow them",
                code="unknown_origin",
            )  # fmt: skip

    def _check_key(self, headers: Headers) -> None:
        # Headers are bytes that were read as Latin-1; the key is sent in UTF-8.
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key.encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                kind="authentication_error",
            )


def _host_name(host: str) -> str:
    """Without the port; IPv6 addresses without their brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
