"""The requests of OpenAI's interface as typed structs. Fields that are not named here are ignored."""

import re
from typing import Any, TypeVar

import msgspec

from kt_kernel.server.errors import invalid

_T = TypeVar("_T", bound=msgspec.Struct)

# Fields that would change the answer and that this server cannot honour: values that change nothing, and what to do.
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "functions": (([],), "use 'tools'"),
    "function_call": (("none", "auto"), "use 'tool_choice'"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "web_search_options": ((), "the server does not search"),
    "suffix": (("",), "text cannot be inserted before a given end"),
    "best_of": ((1,), "use 'n' and choose"),
    "use_beam_search": ((False,), "answers are sampled"),
    "prompt_logprobs": ((), "only tokens of the answer have probabilities"),
    "continue_final_message": ((False,), "use /v1/completions with a prompt of your own"),
    "guided_json": ((), "output is not constrained"),
    "guided_regex": ((), "output is not constrained"),
    "guided_choice": ((), "output is not constrained"),
    "guided_grammar": ((), "output is not constrained"),
    "structured_outputs": ((), "output is not constrained"),
    "grammar": (("",), "output is not constrained"),
    "json_schema": ((), "output is not constrained"),
}

_Refused = msgspec.defstruct("_Refused", [(name, Any, None) for name in REFUSED], kw_only=True)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str


class Common(_Refused, kw_only=True):
    """What both ways to ask have. The second block is not OpenAI's but that of most other servers."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(msgspec.Struct, kw_only=True):
    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str
    function: FunctionTool | None = None


class ChatRequest(Common, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


_DECODERS = {kind: msgspec.json.Decoder(kind) for kind in (ChatRequest, CompletionRequest)}


def decode(body: bytes, kind: type[_T]) -> _T:
    """The request in a body; ApiError says where it is wrong."""
    try:
        request = _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise invalid(_malformed(str(error), body), code="invalid_json") from None
    except UnicodeError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is not valid JSON: it is nested too deeply", code="invalid_json") from None
    _refuse(request)
    return request


def _malformed(message: str, body: bytes) -> str:
    if not body.strip():
        return "the body is empty: it must be a JSON object"
    where = "" if "byte" in message else f" (at byte {len(body)}, the end of the body)"
    return f"the body is not valid JSON: {message.removeprefix('JSON is malformed: ')}{where}"


def _wrong_field(message: str) -> Exception:
    """msgspec says "Expected `int`, got `str` - at `$.n`", or "Object missing required field `x` - at `$.y`"."""
    what, _, path = message.partition(" - at `")
    path = path.rstrip("`").removeprefix("$").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return invalid(f"'{path}' is missing", path)
    what = what.replace("`", "").replace(" | null", "")
    what = what[:1].lower() + what[1:]
    return invalid(f"'{path}': {what}" if path else f"the body: {what}", path or None)


def _refuse(request: Common) -> None:
    for name, (harmless, advice) in REFUSED.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise invalid(f"'{name}' is not supported: {advice}", name, "unsupported_parameter")
    kind = request.response_format.type if request.response_format else "text"
    if kind != "text":
        raise invalid(
            f"'response_format' of type '{kind}' is not supported: output is not constrained, so the form could not be "
            "promised; ask for it in the prompt, and leave response_format out",
            "response_format",
            "unsupported_parameter",
        )
