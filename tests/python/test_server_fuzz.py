"""1,000 malformed requests: each gets a 4xx with an error body, and the server lives."""

import contextlib
import json
import random
import socket
from collections import Counter

import pytest
from server_cases import running, user

CHAT = "/v1/chat/completions"
GOOD = {
    "model": "m",
    "messages": [{"role": "system", "content": "s"}, *user("SAY x")],
    "temperature": 0.5,
    "max_tokens": 4,
    "n": 1,
    "stop": ["a", "b"],
    "logit_bias": {"12": 1},
    "stream": False,
    "seed": 3,
    "top_p": 0.9,
}
# For each field, values that no reading of it allows.
WRONG = {
    "model": [1, [], {}, True],
    "messages": [None, 1, "x", {}, [], [None], [[]], ["x"], [{}], [{"role": None, "content": "x"}], [{"content": "x"}]],
    "temperature": ["x", [], {}, True, -1, 1e308, 3],
    "max_tokens": ["x", [], 1.5, True, 0, -1],
    "n": ["x", {}, 0, -1, 10**30, 1.5, 100_000],
    "stop": [1, {}, [1], [None], [""], ["x"] * 100, "y" * 1000],
    "logit_bias": [[], 1, {"x": 1}, {"1": "x"}, {"1": 1000}, {"-1": 1}, {"9" * 400: 1}],
    "stream": ["x", 1, [], {}],
    "seed": ["x", [], 1.5, 10**40],
    "top_p": ["x", -1, 2, [], 10**400],
}


def http(body: bytes, *, method: str = "POST", path: str = CHAT, headers: str = "") -> bytes:
    first = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{first}Content-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def random_bytes(chosen: random.Random) -> bytes:
    return http(chosen.randbytes(chosen.randint(0, 300)))


def cut_short(chosen: random.Random) -> bytes:
    body = json.dumps(GOOD).encode()
    return http(body[: chosen.randint(0, len(body) - 1)])


def one_byte_off(chosen: random.Random) -> bytes:
    """A control character: nowhere in JSON is one allowed."""
    body = bytearray(json.dumps(GOOD, separators=(",", ":")).encode())
    body[chosen.randrange(len(body))] = chosen.choice([0, 1, 2, 8, 11, 14, 31])
    return http(bytes(body))


def wrong_type(chosen: random.Random) -> bytes:
    field = chosen.choice(list(WRONG))
    return http(json.dumps({**GOOD, field: chosen.choice(WRONG[field])}).encode())


def wrong_message(chosen: random.Random) -> bytes:
    message = chosen.choice(
        [
            {"role": "user", "content": 5},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "user", "content": [{"type": "text"}]},
            {"role": "user", "content": ["x"]},
            {"role": "user", "content": None},
            {"role": "nobody", "content": "x"},
            {"role": "assistant", "content": "x", "tool_calls": [{"id": 5}]},
            {"role": "assistant", "content": "x", "tool_calls": "x"},
        ]
    )
    return http(json.dumps({**GOOD, "messages": [*user("SAY x"), message]}).encode())


def deep(chosen: random.Random) -> bytes:
    depth = chosen.choice([2000, 20_000])
    inner = chosen.choice(["[", '{"a":']) * depth
    field = chosen.choice(["messages", "chat_template_kwargs", "unknown"])
    return http(f'{{"messages":[{{"role":"user","content":"x"}}],"{field}":{inner}'.encode())


def number(chosen: random.Random) -> bytes:
    digits = "9" * chosen.choice([20, 400, 5000])
    text = chosen.choice([digits, "-" + digits, f"1e{digits[:5]}", "NaN", "Infinity", "0x10", "1.", ".5", "+1", "01"])
    field = chosen.choice(["temperature", "n", "top_p"])
    return http(f'{{"messages":[{{"role":"user","content":"SAY x"}}],"{field}":{text}}}'.encode())


def method(chosen: random.Random) -> bytes:
    name = chosen.choice(["GET", "PUT", "DELETE", "PATCH", "BREW", "post", "A" * 200])
    return http(json.dumps(GOOD).encode(), method=name)


def path(chosen: random.Random) -> bytes:
    where = chosen.choice(
        ["/v1", "/v1/chat", f"{CHAT}/", "/%00", "/..%2f..%2fetc/passwd", "/" + "a" * 5000, "/v1/embeddings"]
    )
    return http(json.dumps(GOOD).encode(), path=where)


def header(chosen: random.Random) -> bytes:
    bad = chosen.choice(
        [
            "Content-Length: 7\r\n",
            "Content-Length: x\r\n",
            "Transfer-Encoding: gzip\r\n",
            "No colon here\r\n",
            "Bad name: x\r\n",
            "X: \x00\r\n",
            "X: " + "y" * 70_000 + "\r\n",
            "Host: other\r\n",
            "Origin: https://evil.example\r\n",
            ": empty\r\n",
        ]
    )
    return http(json.dumps(GOOD).encode(), headers=bad)


def oversized(chosen: random.Random) -> bytes:
    return http(b" " * chosen.choice([100_001, 150_000]))


def no_http(chosen: random.Random) -> bytes:
    return chosen.randbytes(chosen.randint(20, 200)).replace(b"\n", b"x") + b"\r\n\r\n"


KINDS = (
    random_bytes,
    cut_short,
    one_byte_off,
    wrong_type,
    wrong_message,
    deep,
    number,
    method,
    path,
    header,
    oversized,
    no_http,
)


def exchange(port: int, request: bytes) -> bytes:
    """The server may answer and close before it has read everything; a reset then takes an answer away that was not
    read yet, so there is a second try.
    """
    return _exchange(port, request) or _exchange(port, request)


def _exchange(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        answer = b""
        with contextlib.suppress(OSError):
            connection.sendall(request)
        with contextlib.suppress(ConnectionResetError):
            while received := connection.recv(65536):
                answer += received
        return answer


def test_the_good_request_is_good():
    with running() as served:
        assert exchange(served.port, http(json.dumps(GOOD).encode())).startswith(b"HTTP/1.1 200 ")


@pytest.mark.timeout(120)
def test_a_thousand_malformed_requests_leave_the_server_alive():
    chosen = random.Random(20261115)
    seen: Counter[int] = Counter()
    with running(body_bytes=100_000) as served:
        for i in range(1000):
            make = KINDS[i % len(KINDS)]
            request = make(chosen)
            answer = exchange(served.port, request)
            what = f"{make.__name__}: {request[:300]!r} -> {answer[:300]!r}"
            assert answer.startswith(b"HTTP/1.1 4"), what
            head, _, body = answer.partition(b"\r\n\r\n")
            error = json.loads(body)["error"]
            assert error.keys() == {"message", "type", "param", "code"}, what
            assert error["message"], what
            seen[int(head[9:12])] += 1
        assert served.post(CHAT, GOOD)[0] == 200
        assert served.idle()
        assert served.engine.stats().finished == {"stop": 1}
    assert seen.keys() >= {400, 403, 404, 405, 413}
