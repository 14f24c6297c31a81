"""The end of a server process: what runs gets its time, nothing new comes in, and the exit code is 0."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from server_cases import running, user

from kt_kernel.server.serving import BindError, bind

SCRIPT = Path(__file__).with_name("serve_scripted.py")


@contextlib.contextmanager
def process(step_seconds: float, grace_seconds: float) -> Iterator[tuple[subprocess.Popen, int]]:
    command = [sys.executable, str(SCRIPT), str(step_seconds), str(grace_seconds)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield started, urlsplit(started.stdout.readline().strip()).port
    finally:
        started.kill()
        started.communicate()


def begin_stream(port: int, **fields: object) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps({"messages": user("words"), "stream": True, **fields})
    )
    answer = connection.getresponse()
    # Two events: the role and the first text.
    for _ in range(4):
        answer.readline()
    return answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_stream_is_finished(number):
    with process(0.02, 20) as (server, port):
        stream = begin_stream(port)
        server.send_signal(number)
        time.sleep(0.3)
        with pytest.raises(ConnectionRefusedError):
            http.client.HTTPConnection("127.0.0.1", port, timeout=5).request("GET", "/health")
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert server.wait(10) == 0
        assert "closed {'stop': 1}" in server.stdout.read()
        assert "Traceback" not in server.stderr.read()


def test_after_its_time_a_stream_is_told_and_cut_off():
    with process(0.5, 0.2) as (server, port):
        stream = begin_stream(port)
        started = time.monotonic()
        server.send_signal(signal.SIGTERM)
        rest = stream.read()
        assert b'"code":"stopping"' in rest
        assert b"[DONE]" not in rest
        assert server.wait(10) == 0
        assert time.monotonic() - started < 5
        assert "closed {'cancelled': 1}" in server.stdout.read()
        assert "Traceback" not in server.stderr.read()


def test_a_second_interrupt_stops_at_once():
    with process(0.5, 60) as (server, port):
        stream = begin_stream(port)
        server.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.poll() is None
        started = time.monotonic()
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 0
        assert time.monotonic() - started < 3
        stream.close()
        assert "Traceback" not in server.stderr.read()


def test_a_server_without_requests_stops_at_once():
    with process(0.001, 60) as (server, port):
        idle = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        idle.request("GET", "/health")
        assert idle.getresponse().read() == b'{"status":"ok","api_key":false}'
        started = time.monotonic()
        server.terminate()
        assert server.wait(10) == 0
        assert time.monotonic() - started < 2


def test_new_requests_while_stopping_are_503():
    with running() as served:
        served.server.service.stop()
        status, answer = served.post("/v1/chat/completions", {"messages": user("x")})
        assert status == 503
        assert answer["error"]["code"] == "stopping"
        assert served.raw("GET", "/health")[0] == 503


def test_an_engine_that_is_closed_is_503():
    with running() as served:
        served.engine.close()
        status, answer = served.post("/v1/chat/completions", {"messages": user("x")})
        assert status == 503
        assert answer["error"]["code"] == "engine_closed"


def test_a_port_that_is_taken_is_one_clear_error():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=rf"127.0.0.1:{port} \(Address already in use\); use --port"):
            bind("127.0.0.1", port)
    with pytest.raises(BindError, match=r"'no\.such\.host\.invalid' is not an address"):
        bind("no.such.host.invalid", 0)
