"""A real server on a free port of this machine, in a thread of its own, and raw HTTP to it."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("msgspec")

from scripted_engine import ScriptedEngine

from kt_kernel.server.serving import Server, base_url, bind
from kt_kernel.server.settings import Limits, Settings

QUICK = Settings(grace_seconds=2.0, hosts=("127.0.0.1", "localhost"))


@dataclass
class Running:
    engine: ScriptedEngine
    server: Server
    url: str
    port: int

    def post(self, path: str, body: object, **headers: str) -> tuple[int, dict]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, _, answer = self.raw("POST", path, content, {"content-type": "application/json", **headers})
        return status, json.loads(answer)

    def raw(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def stream(self, path: str, body: dict) -> Iterator[dict | str]:
        """The data of each event; the last should be "[DONE]"."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            assert answer.getheader("content-type").startswith("text/event-stream")
            for line in answer:
                if line.startswith(b"data: "):
                    data = line[6:].strip()
                    yield "[DONE]" if data == b"[DONE]" else json.loads(data)
        finally:
            connection.close()

    def settle(self, condition: Callable[[], bool], seconds: float = 5.0) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.005)
        return condition()

    def idle(self) -> bool:
        stats = self.engine.stats()
        return stats.running == stats.waiting == 0


@contextlib.contextmanager
def running(engine: ScriptedEngine | None = None, settings: Settings = QUICK, **limits: object) -> Iterator[Running]:
    engine = engine or ScriptedEngine()
    if limits:
        settings = replace(settings, limits=Limits(**limits))
    bound = bind("127.0.0.1", 0)
    url, port = base_url(bound), bound.getsockname()[1]
    ready = threading.Event()
    server = Server(engine, settings, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        assert ready.wait(10)
        yield Running(engine, server, url, port)
    finally:
        server.stop(at_once=True)
        thread.join(10)
        engine.close()
        assert not thread.is_alive()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
