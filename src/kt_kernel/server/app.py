"""The endpoints, as an ASGI application."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kt_kernel.server.chat import prepare_chat
from kt_kernel.server.completions import prepare_completion
from kt_kernel.server.errors import ApiError
from kt_kernel.server.http import json_response, read_body, send_stream, unless_disconnected
from kt_kernel.server.job import Job, stream_chunks, whole_answer
from kt_kernel.server.protocol import ChatRequest, Common, CompletionRequest, decode
from kt_kernel.server.record import Record
from kt_kernel.server.service import Service
from kt_kernel.server.shell import Errors, Gate, Shell

_PAGE = Path(__file__).parent / "page"
_PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/chat.css": ("chat.css", "text/css; charset=utf-8"),
}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

Prepare = Callable[[Service, Common], Awaitable[Job]]


def create_app(service: Service) -> ASGIApp:
    started = int(time.time())
    model = {
        "id": service.engine.name,
        "object": "model",
        "created": started,
        "owned_by": "kt-kernel",
        "context_length": service.engine.context_length,
    }

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != service.engine.name:
            raise _no_such_model(service, request.path_params["name"])
        return json_response(model)

    async def health(request: Request) -> Response:
        status = "stopping" if service.stopping else "ok"
        wants_key = service.settings.api_key is not None
        return json_response({"status": status, "api_key": wants_key}, 503 if service.stopping else 200)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(service.engine.stats()), media_type="text/plain; version=0.0.4")

    routes = [
        Route("/v1/chat/completions", Answering(service, ChatRequest, prepare_chat), methods=["POST"]),
        Route("/v1/completions", Answering(service, CompletionRequest, prepare_completion), methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        *(_page_route(path, *page) for path, page in _PAGE_FILES.items()),
    ]
    router = Router(routes, redirect_slashes=False, default=_not_found)
    app: ASGIApp = Errors(Gate(_WithApp(router), service))
    if service.settings.cors:
        app = CORSMiddleware(
            app, allow_origins=service.settings.cors, allow_methods=["GET", "POST"], allow_headers=["*"], max_age=600
        )
    return Shell(app, service, frozenset(route.path for route in routes if "{" not in route.path))


class Answering:
    """An endpoint that generates."""

    def __init__(self, service: Service, kind: type[Common], prepare: Prepare):
        self._service = service
        self._kind = kind
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._service.limits
        with self._service.admitted():
            body = await read_body(Request(scope, receive), limits.body_bytes, limits.body_seconds)
            await unless_disconnected(receive, self._answer(body, scope, receive, send))

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        asked = decode(body, self._kind)
        if asked.model is not None:
            _check_model(self._service, asked.model)
        job = await self._prepare(self._service, asked)
        record: Record = scope["kt_record"]
        record.stream = job.stream
        with self._service.generating(job.requests) as generation:
            try:
                if job.stream:
                    await send_stream(send, stream_chunks(job, generation))
                else:
                    await json_response(await whole_answer(job, generation))(scope, receive, send)
            finally:
                record.take(generation)


class _WithApp:
    """Inside an application the router raises its 405; alone it would answer in plain text."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._app(scope, receive, send)


def _page_route(path: str, name: str, kind: str) -> Route:
    content = (_PAGE / name).read_bytes()

    async def page(request: Request) -> Response:
        return Response(content, headers=_PAGE_HEADERS, media_type=kind)

    return Route(path, page, methods=["GET"])


def _check_model(service: Service, name: str) -> None:
    """Most clients have some name of their own to send; it matters only if the server is told to be strict."""
    if service.settings.strict_model and name != service.engine.name:
        raise _no_such_model(service, name)


def _no_such_model(service: Service, name: str) -> ApiError:
    message = f"there is no model '{name[:100]}' here; this server has '{service.engine.name}'"
    return ApiError(404, message, param="model", code="model_not_found")


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise ApiError(404, f"there is no {scope['path'][:200]} here; docs/server.md lists what there is", code="not_found")
