"""Bodies in, answers and event streams out, and what to do when the other side goes away."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Send

from kt_kernel.server.errors import ApiError

_T = TypeVar("_T")
encode = msgspec.json.Encoder().encode

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the stream back otherwise
]
PING = b": still working\n\n"
DONE = b"data: [DONE]\n\n"


class DisconnectedError(Exception):
    """The client is gone: there is nobody to answer."""


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(content), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers())


def sse(content: object) -> bytes:
    return b"data: " + encode(content) + b"\n\n"


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The whole body; 413 beyond ``limit`` bytes, as soon as that is known, 408 if it takes too long, 415 if packed."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError(415, f"bodies in '{encoding[:40]}' are not read; send it as it is", code="content_encoding")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)
    try:
        return await asyncio.wait_for(_read(request.receive, limit), seconds)
    except asyncio.TimeoutError:  # in Python 3.10 not the builtin
        raise ApiError(408, f"the body did not come within {seconds:g} s", code="body_timeout") from None


async def _read(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than the limit of {limit} bytes", code="body_too_large")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, which is cancelled, and DisconnectedError raised, if the client goes away first."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise DisconnectedError
        return doing.result()
    finally:
        watching.cancel()
        doing.cancel()
        # Until `work` has cleaned up behind itself; its result was taken above, if there was one.
        await asyncio.gather(doing, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_stream(send: Send, chunks: AsyncIterator[bytes]) -> None:
    """Sends what the iterator yields as it comes. An error in the middle is its last event, and is raised then."""
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    last, failure = b"", None
    try:
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except ApiError as error:
        last, failure = sse(error.body()), error
    # Nothing may be awaited behind this: the end of an answer looks like a disconnect to whoever still receives.
    await send({"type": "http.response.body", "body": last, "more_body": False})
    if failure is not None:
        raise failure
