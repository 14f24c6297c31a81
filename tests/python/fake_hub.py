"""A server that speaks as much of huggingface.co as a download needs, and fails when it is told to."""

import hashlib
import json
import re
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1000  # bytes from which on files are large ones, with a SHA-256


class FakeHub:
    """`repos`: id -> files. A context manager; `address` is where it listens."""

    def __init__(self, repos: dict[str, dict[str, bytes]]):
        self.repos = repos
        # File -> "error", "damaged" or "cut" (in the middle): always, or a list of what happens first.
        self.broken: dict[str, str | list[str]] = {}
        self.refused: dict[str, tuple[int, str]] = {}  # repo -> status, error code
        self.served: list[tuple[str, int]] = []  # files, and where they began
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self, body=True)

            def do_HEAD(self):
                hub.answer(self, body=False)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        if api := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+))?", path):
            repo, what, revision = api.groups()
            self._answer_api(request, repo, what, revision)
        elif file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._answer_file(request, file[2], self.repos[file[1]][file[2]], body)
        else:
            self._send(request, 404, {}, b"")

    def _answer_api(self, request, repo: str, what: str | None, revision: str | None) -> None:
        if repo in self.refused or repo not in self.repos:
            status, code = self.refused.get(repo, (404, "RepoNotFound"))
            self._send(request, status, {"X-Error-Code": code}, b"{}")
        elif revision not in (None, "main", COMMIT):
            self._send(request, 404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        elif what == "tree":
            self._send(request, 200, {}, json.dumps([entry(*file) for file in self.repos[repo].items()]).encode())
        else:
            self._send(request, 200, {}, json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode())

    def _answer_file(self, request, name: str, data: bytes, body: bool) -> None:
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag(data)}"'}
        if not body:
            self._send(request, 200, headers, data, body=False)
            return
        begin = int(re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", "bytes=0-"))[1])
        self.served.append((name, begin))
        how = self.broken.get(name)
        if isinstance(how, list):
            how = how.pop(0) if how else None
        if how == "error":
            self._send(request, 500, {}, b"")
            return
        if how == "damaged":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        cut = (len(data) - begin) // 2 if how == "cut" else 0
        self._send(request, 206 if begin else 200, headers, data[begin:], cut=cut)

    def _send(
        self, request, status: int, headers: dict[str, str], data: bytes, body: bool = True, cut: int = 0
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(data[:cut] if cut else data)
        if cut:
            request.wfile.flush()
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)


def etag(data: bytes) -> str:
    if len(data) >= LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(name: str, data: bytes) -> dict[str, object]:
    found = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
    if len(data) >= LARGE:
        found["lfs"] = {"oid": etag(data), "size": len(data), "pointerSize": 130}
    return found
