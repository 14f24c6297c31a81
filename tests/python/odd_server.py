"""A server that answers with given bytes, whatever is asked: what other servers, proxies and cables do."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODELS = {"object": "list", "data": [{"id": "first"}, {"id": "second"}]}


class OddServer(ThreadingHTTPServer):
    """`on_post` answers questions; `asked` are their bodies, `seen` the request lines and headers of everything."""

    daemon_threads = True

    def __init__(self, on_post: Callable[[BaseHTTPRequestHandler], None], on_get: Callable | None = None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.on_post, self.on_get = on_post, on_get or (lambda to: send(to, 200, MODELS))
        self.asked: list[dict] = []
        self.seen: list[tuple[str, dict[str, str]]] = []

    @property
    def port(self) -> int:
        return self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append((self.requestline, dict(self.headers)))
        self.server.on_get(self)

    def do_POST(self) -> None:
        self.server.seen.append((self.requestline, dict(self.headers)))
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.on_post(self)

    def log_message(self, *_) -> None:
        pass


def send(to: BaseHTTPRequestHandler, status: int, body: object, kind: str = "application/json", **headers: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    to.send_response(status)
    to.send_header("content-type", kind)
    to.send_header("content-length", str(len(content)))
    for name, value in headers.items():
        to.send_header(name, value)
    to.end_headers()
    to.wfile.write(content)


def events(*data: object) -> bytes:
    """Server-sent events with the odd line that servers put between them."""
    lines = [": still there\n\n"]
    lines += [f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n" for item in data]
    return "".join(lines).encode()


def delta(finish: str | None = None, **fields: str) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def stream(*data: object) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda to: send(to, 200, events(*data), "text/event-stream; charset=utf-8")


@contextlib.contextmanager
def odd_server(on_post: Callable | None = None, on_get: Callable | None = None) -> Iterator[OddServer]:
    with OddServer(on_post or stream(delta(content="hello", finish="stop"), "[DONE]"), on_get) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
