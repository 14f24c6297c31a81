"""What the server refuses: fields, limits, keys, hosts and origins; each with a status and OpenAI's error body."""

import http.client
import json
import logging
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from scripted_engine import ScriptedEngine
from server_cases import QUICK, running, user

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served():
    with running(body_bytes=20_000, body_seconds=0.5) as found:
        yield found


def asked(**fields: object) -> dict:
    return {"messages": user("SAY x"), **fields}


def assert_error(answer: dict, word: str, param: str | None = None) -> None:
    assert answer.keys() == {"error"}
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert word in answer["error"]["message"]
    assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("temperature", -0.1, "0.0 to 2.0"),
        ("temperature", "hot", "expected float, got str"),
        ("top_p", 1.1, "0.0 to 1.0"),
        ("top_k", -2, "legal"),
        ("min_p", 2, "legal"),
        ("presence_penalty", 3, "legal"),
        ("repetition_penalty", 0, "legal"),
        ("seed", 2**70, "legal"),
        ("n", 0, "1 to 16"),
        ("n", 17, "16 answers"),
        ("n", 10**18, "16 answers"),
        ("max_tokens", 0, "at least 1"),
        ("max_completion_tokens", -5, "at least 1"),
        ("stop", [], None),
        ("stop", "", "1 to 256"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop", "x" * 257, "1 to 256"),
        ("stop_token_ids", [256], "0 to 255"),
        ("logit_bias", {"x": 1}, "not a token id"),
        ("logit_bias", {"256": 1}, "0 to 255"),
        ("logit_bias", {"1": 101}, "-100 to 100"),
        ("logit_bias", {"\u0663": 1}, "not a token id"),
        ("top_logprobs", 3, "needs 'logprobs'"),
        ("tools", [{"type": "web"}], "knows no tools"),
        ("tool_choice", "required", "not constrained"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "named tool"),
        ("response_format", {"type": "json_object"}, "json_object"),
        ("response_format", {"type": "text"}, None),
        ("functions", [{"name": "f"}], "use 'tools'"),
        ("functions", [], None),
        ("guided_json", {}, "not constrained"),
        ("modalities", ["audio"], "text"),
        ("modalities", ["text"], None),
        ("chat_template_kwargs", {"chat_template": "{{ 7 * 7 }}"}, "may not set 'chat_template'"),
        ("messages", [], "empty"),
        ("messages", [{"role": "wizard", "content": "x"}], "'wizard' is not one of system"),
        ("messages", [{"role": "user"}], "content' is missing"),
        ("messages", user("REFUSE"), "the template refuses this"),
        ("unheard_of", {"anything": 1}, None),
        ("user", "me", None),
    ],
)
def test_fields(served, field, value, word):
    status, answer = served.post(CHAT, asked(**{field: value}))
    if word is None:
        assert status == 200, answer
        return
    assert status == 400
    assert word in answer["error"]["message"]


def test_images_are_refused_by_name(served):
    content = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    status, answer = served.post(CHAT, {"messages": [{"role": "user", "content": content}]})
    assert status == 400
    assert_error(answer, "'image_url' is not supported", "messages[0].content[1]")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "'prompt' is missing"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "'prompt' is empty"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": ["x", 1]}, "mixes"),
        ({"prompt": [256]}, "0 to 255"),
        ({"prompt": [-1]}, "0 to 255"),
        ({"prompt": ["x"] * 17}, "16 answers"),
        ({"prompt": ["x"] * 9, "n": 2}, "16 answers"),
        ({"prompt": "x", "logprobs": 21}, "0 to 20"),
        ({"prompt": "x", "logprobs": 1, "echo": True}, "'echo' with 'logprobs'"),
        ({"prompt": "x", "best_of": 3}, "use 'n'"),
        ({"prompt": "x", "suffix": "y"}, "inserted"),
    ],
)
def test_fields_of_completions(served, fields, word):
    status, answer = served.post("/v1/completions", fields)
    assert status == 400
    assert word in answer["error"]["message"]


def test_a_prompt_beyond_the_context(served):
    status, answer = served.post("/v1/completions", {"prompt": "x" * 5000})
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "4096" in answer["error"]["message"]


def test_malformed_json_is_told_with_its_place(served):
    status, answer = served.post(CHAT, b'{"messages": [}')
    assert status == 400
    assert_error(answer, "(byte 14)")
    status, answer = served.post(CHAT, b'{"messages": [')
    assert_error(answer, "at byte 14, the end")
    status, answer = served.post(CHAT, b'{"messages": "hello"}')
    assert_error(answer, "expected array, got str", "messages")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/gpt-4o", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/chat.js/../../app.py", 404),
        ("HEAD", "/health", 200),
    ],
)
def test_paths_and_methods(served, method, path, status):
    found, headers, body = served.raw(method, path)
    assert found == status
    if status >= 400:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert headers["allow"]


def test_bodies_that_are_too_large(served):
    status, answer = served.post(CHAT, asked(messages=user("x" * 30_000)))
    assert status == 413
    assert_error(answer, "20000 bytes")
    # In chunks, without a length that could be read beforehand.
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    connection.request("POST", CHAT, iter([b"x" * 10_000] * 3), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_packed_bodies_are_refused(served):
    status, answer = served.post(CHAT, asked(), **{"content-encoding": "gzip"})
    assert status == 415
    assert_error(answer, "'gzip'")


def test_a_body_that_does_not_come(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_what_is_no_http_gets_an_error_body(served):
    for head in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b",
        b"GET /\r\nHost x\r\n\r\n",
        b"G" * 70_000,
    ):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
            connection.sendall(head + b"\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_a_full_queue_is_429_with_retry_after():
    with running(ScriptedEngine(slots=1, max_queue=1, step_seconds=0.02)) as served:
        streams = [served.stream(CHAT, asked(messages=user("words"))) for _ in range(2)]
        assert [next(stream)["choices"][0]["delta"]["role"] for stream in streams] == ["assistant"] * 2
        status, headers, body = served.raw("POST", CHAT, json.dumps(asked()).encode())
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert_error(json.loads(body), "1 requests wait")
        # Of two choices the first would still fit: neither may stay.
        served.settle(lambda: served.engine.stats().waiting == 0, 10)
        before = served.engine.stats().running
        assert served.post(CHAT, asked(n=3))[0] == 429
        for stream in streams:
            stream.close()
        assert served.settle(served.idle)
        assert before <= 1
        assert 'kt_requests_total{endpoint="/v1/chat/completions",outcome="rejected"} 2' in metrics(served)


def test_requests_in_flight_are_bounded():
    with running(ScriptedEngine(slots=4, step_seconds=0.02), in_flight=2) as served:
        streams = [served.stream(CHAT, asked(messages=user("words"))) for _ in range(2)]
        for stream in streams:
            next(stream)
        assert served.post(CHAT, asked())[0] == 429
        for stream in streams:
            stream.close()
        assert served.settle(lambda: served.post(CHAT, asked())[0] == 200)


def test_max_tokens_of_the_server():
    with running(max_tokens=2) as served:
        _, answer = served.post(CHAT, asked(messages=user("words"), max_tokens=50))
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["choices"][0]["finish_reason"] == "length"


def test_api_key():
    with running(settings=replace(QUICK, api_key="secret")) as served:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic secret"},
            {"authorization": "ü"},
        ):
            status, answered, body = served.raw("GET", "/v1/models", headers=headers)
            assert status == 401
            assert answered["www-authenticate"] == "Bearer"
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert served.post(CHAT, asked())[0] == 401
        assert served.post(CHAT, asked(), authorization="Bearer secret")[0] == 200
        assert served.raw("GET", "/metrics")[0] == 401
        assert served.raw("GET", "/")[0] == 200
        status, _, body = served.raw("GET", "/health")
        assert (status, json.loads(body)) == (200, {"status": "ok", "api_key": True})


def test_other_hosts_and_origins_stay_outside(served):
    ask = json.dumps(asked()).encode()
    assert served.raw("GET", "/health", headers={"host": "evil.example"})[0] == 403
    assert served.raw("GET", "/health", headers={"host": "[::1]:80"})[0] == 403
    assert served.raw("GET", "/health", headers={"host": f"LOCALHOST:{served.port}"})[0] == 200
    assert served.raw("POST", CHAT, ask, {"origin": "https://evil.example", "content-type": "text/plain"})[0] == 403
    assert served.raw("POST", CHAT, ask, {"origin": "null"})[0] == 403
    assert served.raw("POST", CHAT, ask, {"origin": f"http://127.0.0.1:{served.port}"})[0] == 200
    assert "access-control-allow-origin" not in served.raw("GET", "/health")[1]


def test_cors():
    with running(settings=replace(QUICK, cors=("https://app.example",), api_key="k")) as served:
        asks = {
            "origin": "https://app.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        status, headers, _ = served.raw("OPTIONS", CHAT, headers=asks)
        assert status == 200
        assert headers["access-control-allow-origin"] == "https://app.example"
        # Errors too: without the header a page could not read what is wrong.
        status, headers, _ = served.raw("GET", "/v1/models", headers={"origin": "https://app.example"})
        assert (status, headers["access-control-allow-origin"]) == (401, "https://app.example")
        assert served.raw("GET", "/v1/models", headers={"origin": "https://evil.example"})[0] == 403


def test_names_of_models(served):
    assert served.post(CHAT, asked(model="gpt-4o"))[1]["model"] == "scripted"
    with running(settings=replace(QUICK, strict_model=True)) as strict:
        status, answer = strict.post(CHAT, asked(model="gpt-4o"))
        assert status == 404
        assert_error(answer, "this server has 'scripted'", "model")
        assert strict.post(CHAT, asked(model="scripted"))[0] == 200


def metrics(served) -> str:
    return served.raw("GET", "/metrics")[2].decode()


def test_metrics():
    with running() as served:
        served.post(CHAT, asked(messages=user("words"), max_tokens=4))
        served.post(CHAT, asked(n=0))
        served.raw("GET", '/no"such%0A')
        text = metrics(served)
        assert 'kt_requests_total{endpoint="/v1/chat/completions",outcome="ok"} 1' in text
        assert 'kt_requests_total{endpoint="/v1/chat/completions",outcome="client_error"} 1' in text
        assert 'kt_requests_total{endpoint="other",outcome="client_error"} 1' in text
        assert "\nkt_completion_tokens_total 4\n" in text
        assert 'kt_answers_total{finish="length"} 1' in text
        assert "\nkt_first_token_seconds_count 1\n" in text
        assert "\nkt_token_seconds_count 1\n" in text
        values = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#"):
                assert name not in values
                values[name] = float(value)
        buckets = [value for name, value in values.items() if name.startswith("kt_request_seconds_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == values["kt_request_seconds_count"] == 1
        assert values["kt_http_received_bytes_total"] > 50


def test_each_request_is_one_line_in_the_log(caplog):
    caplog.set_level(logging.INFO, "kt_kernel.server")
    with running() as served:
        served.post(CHAT, asked(messages=user("words"), max_tokens=4))
        list(served.stream(CHAT, asked(messages=user("FAIL"))))
        served.raw("GET", "/a%0Ab%1B[31m")
        served.raw("GET", "/health")
        served.raw("GET", "/")
        served.settle(lambda: len(caplog.messages) >= 3)
    answered, failed, unknown = caplog.messages
    assert re.fullmatch(
        r"POST \S+ 200, 22 \(0 cached\) -> 4 tokens, first after \d\.\d\d s, [\d.]+ tokens/s, \d\.\d\d s", answered
    )
    assert failed.startswith("POST /v1/chat/completions failed, stream, ")
    assert "the script says to fail" in failed
    assert unknown.startswith("GET /a?b?[31m 404, ")


def test_the_server_needs_neither_torch_nor_transformers():
    code = "import sys, kt_kernel.server.serving; print({'torch', 'transformers'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


def test_a_silent_stream_gets_pings():
    engine = ScriptedEngine(step_seconds=0.03)
    with running(engine, replace(QUICK, ping_seconds=0.05)) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
        connection.request("POST", CHAT, json.dumps(asked(messages=user("SLOW words"), stream=True, max_tokens=2)))
        answer = connection.getresponse().read()
        connection.close()
    assert answer.count(b": still working\n\n") >= 2
    assert answer.endswith(b"data: [DONE]\n\n")


def test_many_idle_connections_do_not_stand_in_the_way(served):
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(100)]
    started = time.monotonic()
    assert served.post(CHAT, asked())[0] == 200
    assert time.monotonic() - started < 2
    for connection in idle:
        connection.close()
