"""What `kt chat` makes of servers: those that keep to OpenAI's interface, and those that do not."""

import socket

import pytest
from odd_server import delta, events, odd_server, send, stream

from kt_kernel.chat.answer import Answer
from kt_kernel.chat.errors import ChatError
from kt_kernel.chat.server import Piece, Server, Usage, base_url, is_this_machine

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def to(server, key: str | None = None) -> Server:
    return Server(base_url("127.0.0.1", server.port), key)


def pieces(server) -> list[Piece]:
    return list(to(server).answer({"messages": []}))


def text(found: list[Piece]) -> str:
    return "".join(piece.content for piece in found)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("localhost", "http://localhost:8000/v1"),
        ("0.0.0.0", "http://127.0.0.1:8000/v1"),
        ("::", "http://[::1]:8000/v1"),
        ("[fe80::1]", "http://[fe80::1]:8000/v1"),
        ("https://api.example", "https://api.example/v1"),
        ("https://api.example:1/x/", "https://api.example:1/x"),
    ],
)
def test_addresses(host, url):
    assert base_url(host, 8000) == url


def test_what_is_no_address():
    with pytest.raises(ChatError, match="no http or https address"):
        base_url("ftp://x", 1)


def test_which_hosts_are_this_machine():
    assert all(map(is_this_machine, ["localhost", "a.localhost", "127.0.0.1", "127.9.9.9", "::1"]))
    assert not any(map(is_this_machine, ["localhost.example", "10.0.0.1", "example", "0.0.0.0.example"]))


def test_a_stream_with_reasoning_and_usage():
    parts = [
        delta(role="assistant"),
        delta(reasoning_content="hm"),
        delta(reasoning="m"),
        delta(content="你"),
        delta("stop"),
    ]
    with odd_server(stream(*parts, USAGE, "[DONE]")) as server:
        found = pieces(server)
    assert "".join(piece.reasoning for piece in found) == "hmm"
    assert text(found) == "你"
    assert Usage(7, 3) in [piece.usage for piece in found]


def test_a_stream_may_end_without_done_and_an_answer_without_a_stream():
    with odd_server(stream(delta(content="a"), delta(finish="length"))) as server:
        assert [piece.finish for piece in pieces(server)] == [None, "length"]
    whole = {"choices": [{"message": {"content": "b"}, "finish_reason": "stop"}], "usage": USAGE["usage"]}
    with odd_server(lambda handler: send(handler, 200, whole)) as server:
        assert pieces(server) == [Piece("b", "", "stop", Usage(7, 3))]


@pytest.mark.parametrize("event", [{"choices": None}, {"choices": [3]}, {"choices": [{"delta": None}]}, {"usage": 1}])
def test_odd_events_are_nothing(event):
    with odd_server(stream(event, delta(content="a", finish="stop"))) as server:
        assert text(pieces(server)) == "a"


def test_the_key_and_the_models():
    with odd_server() as server:
        assert to(server, "secret").models() == ["first", "second"]
        assert to(server).models() == ["first", "second"]
        with_key, without = (headers.get("Authorization") for _, headers in server.seen)
    assert (with_key, without) == ("Bearer secret", None)


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key(status):
    with odd_server(on_get=lambda handler: send(handler, status, {"error": {"message": "no"}})) as server:
        with pytest.raises(ChatError, match="asks for a key: give it with --api-key"):
            to(server).models()
        with pytest.raises(ChatError, match="does not accept this key"):
            to(server, "wrong").models()


def test_a_server_without_a_list_of_models():
    with odd_server(on_get=lambda handler: send(handler, 404, {})) as server:
        assert to(server).models() == []


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, {"error": {"message": "too\nlong", "code": None}}, "400 too long"),
        (404, {"message": "no such model", "object": "error"}, "404 no such model"),
        (422, {"detail": [{"msg": "x"}]}, '422 .*"msg": "x"'),
        (502, b"<html>a page</html>", "502 Bad Gateway"),
    ],
)
def test_errors_of_the_server_are_told(status, body, message):
    with odd_server(lambda handler: send(handler, status, body)) as server, pytest.raises(ChatError, match=message):
        pieces(server)


def test_an_error_in_the_middle():
    with (
        odd_server(stream(delta(content="a"), {"error": {"message": "out of memory"}})) as server,
        pytest.raises(ChatError, match="the server failed: out of memory"),
    ):
        pieces(server)


def test_a_redirect_is_told_and_not_followed():
    with odd_server(on_get=lambda handler: send(handler, 302, b"", location="http://elsewhere.example/")) as server:
        with pytest.raises(ChatError, match=r"has moved to http://elsewhere\.example/: give that to --host"):
            to(server, "secret").models()
        assert len(server.seen) == 1


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"3", b"[" * 100_000])
def test_a_server_that_is_something_else(body):
    with (
        odd_server(on_get=lambda handler: send(handler, 200, body)) as server,
        pytest.raises(ChatError, match="does not answer as OpenAI-compatible servers do"),
    ):
        to(server).models()


def test_nothing_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with pytest.raises(ChatError, match=f"nothing listens at http://127.0.0.1:{port}/v1: start a server"):
        Server(base_url("127.0.0.1", port), None).models()
    with pytest.raises(ChatError, match="cannot be reached"):
        Server(base_url("no.such.host.invalid", 1), None).models()


def _cut(handler, content: bytes, chunked: bool) -> None:
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    if chunked:
        handler.send_header("transfer-encoding", "chunked")
        content = b"%x\r\n%s\r\n" % (len(content), content)
    handler.end_headers()
    handler.wfile.write(content)
    handler.close_connection = True


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("content", [b"", events(delta(content="a")), events(delta(content="a")) + b'data: {"cho'])
def test_a_server_that_goes_away_in_the_middle(content, chunked):
    with (
        odd_server(lambda handler: _cut(handler, content, chunked)) as server,
        pytest.raises(ChatError, match="went away in the middle of the answer"),
    ):
        pieces(server)


def test_a_server_that_closes_at_once():
    def hang_up(handler):
        handler.connection.shutdown(socket.SHUT_RDWR)

    with odd_server(hang_up) as server, pytest.raises(ChatError, match="went away"):
        pieces(server)


def test_proxies_are_for_other_machines_only(monkeypatch):
    with odd_server() as proxy:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with odd_server() as server:
            to(server).models()
            assert (len(server.seen), len(proxy.seen)) == (1, 0)
        assert Server("http://elsewhere.example/v1", None).models() == ["first", "second"]
        assert proxy.seen[0][0].startswith("GET http://elsewhere.example/v1/models ")


def test_timings():
    answer = Answer(started=10.0, first=10.5, last=12.5, ended=13.0, pieces=5)
    assert answer.timings(streamed=True) == ("Total 3.00 s · TTFT 0.50 s · TPOT 500.0 ms (2.0 tokens/s) · Out about 5")
    answer.usage = Usage(7, 21)
    assert answer.timings(streamed=True) == (
        "Total 3.00 s · TTFT 0.50 s · TPOT 100.0 ms (10.0 tokens/s) · In 7 · Out 21"
    )
    assert answer.timings(streamed=False) == "Total 3.00 s · In 7 · Out 21"


def test_done_does_not_hide_why_an_answer_ended():
    answer = Answer()
    for finish in (None, "length", "stop"):
        answer.take(Piece(finish=finish))
    assert answer.finish == "length"
