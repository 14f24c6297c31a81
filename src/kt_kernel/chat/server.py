"""An OpenAI-compatible server, asked with the standard library alone.

An answer is a stream of server-sent events: lines ``data: {json}``, the last ``data: [DONE]``. Some servers end without
it, so an answer is whole once a finish_reason or [DONE] came.
"""

import http.client
import ipaddress
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from kt_kernel.chat.errors import ChatError
from kt_kernel.cli.language import t

_LIST_SECONDS = 10.0  # a list of models is there at once; an answer may wait minutes for its prompt, so it has no limit
_UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a server listens for everybody, this machine reaches it


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Piece:
    """What one event adds to an answer."""

    content: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: Usage | None = None


def base_url(host: str, port: int) -> str:
    """`host` is a name, an address, or a whole URL, which then says the port itself."""
    if "://" in host:
        parts = urlsplit(host)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(t("'{host}' is no http or https address", host=host))
        return host.rstrip("/") if parts.path.strip("/") else f"{host.rstrip('/')}/v1"
    host = _UNSPECIFIED.get(host.strip("[]"), host.strip("[]"))
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class _NotFoundError(ChatError):
    pass


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Followed, a question would lose its body and the key would go to another host."""

    def redirect_request(self, *_) -> None:
        return None


class Server:
    def __init__(self, url: str, api_key: str | None):
        self.url = url
        self._api_key = api_key
        # A proxy cannot reach the loopback of this machine, whatever the environment says.
        proxies = {} if is_this_machine(urlsplit(url).hostname or "") else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _NoRedirects)

    def models(self) -> list[str]:
        """The names under which models are served; none where the server has no list."""
        try:
            with self._open("/models", None, _LIST_SECONDS) as answer:
                found = self._read_json(answer).get("data")
        except _NotFoundError:
            return []
        names = [model.get("id") for model in found if isinstance(model, dict)] if isinstance(found, list) else []
        return [name for name in names if isinstance(name, str)]

    def answer(self, question: Mapping[str, object]) -> Iterator[Piece]:
        """The pieces of an answer as they come; ChatError where it cannot be had whole. Close it to stop the server."""
        with self._open("/chat/completions", json.dumps(question).encode(), None) as answer:
            if "text/event-stream" not in answer.headers.get("content-type", ""):
                yield self._piece(self._read_json(answer), "message")
                return
            finished = False
            for event in self._events(answer):
                piece = self._piece(event, "delta")
                finished = finished or piece.finish is not None
                yield piece
            if not finished:
                raise ChatError(t("the server at {url} went away in the middle of the answer", url=self.url))

    def _events(self, answer: http.client.HTTPResponse) -> Iterator[dict]:
        try:
            for line in answer:
                field, _, data = line.partition(b":")
                if field != b"data":
                    continue
                if data.strip() == b"[DONE]":
                    yield {"choices": [{"finish_reason": "stop"}]}
                    return
                if not line.endswith(b"\n"):  # cut off
                    return
                yield self._object(data)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def _piece(self, event: dict, key: str) -> Piece:
        if event.get("error"):
            raise ChatError(t("the server failed: {message}", message=_message(event)))
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        part = choice.get(key)
        part = part if isinstance(part, dict) else {}
        # Two names for the same: vLLM dropped the longer one.
        reasoning = part.get("reasoning_content") or part.get("reasoning")
        return Piece(_text(part.get("content")), _text(reasoning), choice.get("finish_reason"), _usage(event))

    def _open(self, path: str, body: bytes | None, timeout: float | None) -> http.client.HTTPResponse:
        headers = {"accept": "application/json, text/event-stream"}
        if body is not None:
            headers["content-type"] = "application/json"
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        try:
            request = urllib.request.Request(self.url + path, body, headers)
            return self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error, path) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from None

    def _read_json(self, answer: http.client.HTTPResponse) -> dict:
        try:
            return self._object(answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def _object(self, text: bytes) -> dict:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ChatError(t("{url} does not answer as OpenAI-compatible servers do", url=self.url))
        return found

    def _refused(self, error: urllib.error.HTTPError, path: str) -> ChatError:
        try:
            text = error.read(65536).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            text = ""
        if error.code in (401, 403):
            if self._api_key:
                return ChatError(t("the server at {url} does not accept this key: see --api-key", url=self.url))
            return ChatError(
                t("the server at {url} asks for a key: give it with --api-key or KT_KERNEL_API_KEY", url=self.url)
            )
        if location := error.headers.get("location"):
            return ChatError(t("{url} has moved to {location}: give that to --host", url=self.url, location=location))
        try:
            message = _message(json.loads(text))
        except (ValueError, RecursionError):
            # A page of a server or proxy says less than its status line.
            message = error.reason
        kind = _NotFoundError if error.code == 404 else ChatError
        return kind(f"{self.url}{path}: {error.code} {message}".strip())

    def _unreachable(self, error: Exception) -> ChatError:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ConnectionRefusedError):
            return ChatError(
                t(
                    "nothing listens at {url}: start a server with 'kt run', or see --host and --port",
                    url=self.url,
                )
            )
        if isinstance(reason, TimeoutError):
            return ChatError(t("the server at {url} does not answer: see --host and --port", url=self.url))
        if isinstance(reason, ConnectionError | http.client.HTTPException):
            return ChatError(t("the server at {url} went away in the middle of the answer", url=self.url))
        why = getattr(reason, "strerror", None) or str(reason)
        return ChatError(t("{url} cannot be reached ({reason}): see --host and --port", url=self.url, reason=why))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _usage(event: dict) -> Usage | None:
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Usage(*counts) if all(isinstance(count, int) for count in counts) else None


def _message(body: object) -> str:
    """OpenAI's form of an error, and those of servers that have one of their own."""
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            body = body[key]
    return " ".join((body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)).split())
