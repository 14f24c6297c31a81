"""POST /v1/chat/completions."""

import json
from collections.abc import Mapping, Sequence

import msgspec

from kt_kernel.engine.api import Event, Request
from kt_kernel.server import rules
from kt_kernel.server.answers.declared import Declared
from kt_kernel.server.answers.parts import Call, Content, Parser, Reasoning
from kt_kernel.server.errors import ApiError, invalid
from kt_kernel.server.job import Envelope, chat_logprob
from kt_kernel.server.protocol import ChatRequest, Message, Tool
from kt_kernel.server.service import Service

_ROLES = ("system", "developer", "user", "assistant", "tool")
# Arguments of the template's caller, not of the template.
_RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
_PROMPT_END = 16  # tokens: enough for the mark that opens reasoning


async def prepare_chat(service: Service, asked: ChatRequest) -> "ChatJob":
    """Checks the request and makes tokens of it."""
    rules.check_choices(service.limits, asked, 1)
    tools = _tools(service, asked)
    messages = _messages(service, asked.messages)
    arguments = _template_arguments(asked)
    prompt = await _prompt(service, messages, tools, arguments)
    requests = rules.engine_requests(
        service.engine,
        service.limits,
        asked,
        [prompt],
        max_tokens=_max_tokens(asked),
        logprobs=_logprobs(service, asked),
        special_text=service.engine.text.declares_answers or service.style.special_text(bool(tools)),
    )
    one_call = asked.parallel_tool_calls is False
    parsers = await service.with_text(_parsers, service, prompt, tools, len(requests))
    choices = [ChatChoice(i, parser, one_call, asked.logprobs is True) for i, parser in enumerate(parsers)]
    return ChatJob(asked, service.engine.name, requests, choices)


def _parsers(
    service: Service, prompt: Sequence[int], tools: Sequence[Mapping[str, object]], count: int
) -> list[Parser]:
    text = service.engine.text
    if text.declares_answers:
        return [Declared(text.answer_parser(prompt, tools or None), bool(tools)) for _ in range(count)]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    prompt_end = text.decode(prompt[-_PROMPT_END:]) if service.style.thinking else ""
    return [service.style.parser(prompt_end, schemas) for _ in range(count)]


async def _prompt(
    service: Service, messages: list[dict[str, object]], tools: list[dict[str, object]], arguments: dict[str, object]
) -> list[int]:
    """Arguments of earlier calls are objects for most templates; those of DeepSeek V3 and V3.1 take text only."""
    try:
        return await service.with_text(service.engine.text.chat, messages, tools or None, **arguments)
    except ApiError:
        if not any(message.get("tool_calls") for message in messages):
            raise
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return await service.with_text(service.engine.text.chat, messages, tools or None, **arguments)


def _max_tokens(asked: ChatRequest) -> int | None:
    if asked.max_completion_tokens is not None:
        return rules.check_max_tokens(asked.max_completion_tokens, "max_completion_tokens")
    return rules.check_max_tokens(asked.max_tokens, "max_tokens")


def _logprobs(service: Service, asked: ChatRequest) -> int | None:
    if not asked.logprobs:
        if asked.top_logprobs:
            raise invalid("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        return None
    return rules.check_top_logprobs(service.limits, asked.top_logprobs or 0, "top_logprobs")


def _template_arguments(asked: ChatRequest) -> dict[str, object]:
    arguments = dict(asked.chat_template_kwargs or {})
    for name in arguments:
        if name in _RESERVED:
            raise invalid(f"'chat_template_kwargs' may not set '{name}'", "chat_template_kwargs")
    if asked.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", asked.reasoning_effort)
        if asked.reasoning_effort == "none":
            # What templates call it differs: Qwen and GLM, or DeepSeek V3.1.
            arguments.setdefault("enable_thinking", False)
            arguments.setdefault("thinking", False)
    return arguments


def _tools(service: Service, asked: ChatRequest) -> list[dict[str, object]]:
    """The tools that the model hears of. A choice that would have to be enforced is refused."""
    choice = asked.tool_choice
    if choice == "none":
        return []
    tools = asked.tools or []
    if choice not in (None, "auto"):
        named = "required" if choice == "required" else "a named tool"
        raise invalid(
            f"'tool_choice': {named} is not supported, since output is not constrained; use 'auto' and say in the "
            "prompt which tool is to be called",
            "tool_choice",
            "unsupported_parameter",
        )
    if len(tools) > service.limits.tools:
        raise invalid(f"'tools' has {len(tools)} entries; at most {service.limits.tools} may be", "tools")
    if tools and not (service.style.knows_tools or service.engine.text.declares_answers):
        raise invalid("'tools': the chat template of this model knows no tools", "tools", "unsupported_parameter")
    return [_tool(i, tool) for i, tool in enumerate(tools)]


def _tool(index: int, tool: Tool) -> dict[str, object]:
    if tool.type != "function" or tool.function is None:
        raise invalid(f"'tools[{index}]': type '{tool.type}' is not supported; use 'function'", f"tools[{index}]")
    if not tool.function.name or len(tool.function.name) > 128:
        raise invalid(f"'tools[{index}]': its name must have 1 to 128 characters", f"tools[{index}]")
    return {"type": "function", "function": msgspec.to_builtins(tool.function)}


def _messages(service: Service, messages: Sequence[Message]) -> list[dict[str, object]]:
    if not messages:
        raise invalid("'messages' is empty", "messages")
    return [_message(f"messages[{i}]", message, service.style.knows_developer) for i, message in enumerate(messages)]


def _message(where: str, message: Message, knows_developer: bool) -> dict[str, object]:
    """As templates take them: content is text, and arguments of calls are objects."""
    if message.role not in _ROLES:
        raise invalid(f"'{where}': role '{message.role}' is not one of {', '.join(_ROLES)}", f"{where}.role")
    role = "system" if message.role == "developer" and not knows_developer else message.role
    if message.content is None and role != "assistant":
        raise invalid(f"'{where}.content' is missing", f"{where}.content")
    made: dict[str, object] = {"role": role, "content": _text_of(where, message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return made


def _text_of(where: str, message: Message) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for i, part in enumerate(message.content):
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            why = (
                "has no text"
                if part.type == "text"
                else f"of type '{part.type}' is not supported: this is a text model"
            )
            raise invalid(f"'{where}.content[{i}]' {why}", f"{where}.content[{i}]")
        texts.append(text)
    return "\n".join(texts)


def _arguments(arguments: str | Mapping[str, object]) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


class ChatChoice:
    """One answer: chunks while it comes, and the message in the end."""

    def __init__(self, index: int, parser: Parser, one_call: bool, with_logprobs: bool):
        self._index = index
        self._parser = parser
        self._one_call = one_call
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, object]] = []
        self._logprobs: list[dict[str, object]] | None = [] if with_logprobs else None
        self._finish: str | None = None

    def opening(self) -> dict[str, object]:
        return self._chunk({"role": "assistant", "content": ""})

    def take(self, event: Event) -> list[dict[str, object]]:
        parts = list(self._parser.feed(event.text))
        if event.finish is not None:
            parts += self._parser.end()
        deltas = [delta for part in parts if (delta := self._delta(part))]
        logprobs = None
        if self._logprobs is not None and event.logprobs:
            logprobs = [chat_logprob(found) for found in event.logprobs]
            self._logprobs += logprobs
            # Tokens whose text is held back still have their probabilities told.
            deltas = deltas or [{}]
        chunks = [self._chunk(delta) for delta in deltas]
        if logprobs:
            chunks[0]["logprobs"] = {"content": logprobs}
        if event.finish is not None:
            self._finish = "tool_calls" if self._calls and event.finish == "stop" else event.finish
            chunks.append({**self._chunk({}), "finish_reason": self._finish})
        return chunks

    def whole(self) -> dict[str, object]:
        content = "".join(self._content)
        message: dict[str, object] = {"role": "assistant", "content": content or (None if self._calls else "")}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = None if self._logprobs is None else {"content": self._logprobs}
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish}

    def _delta(self, part: Content | Reasoning | Call) -> dict[str, object] | None:
        if isinstance(part, Content):
            self._content.append(part.text)
            return {"content": part.text}
        if isinstance(part, Reasoning):
            self._reasoning.append(part.text)
            return {"reasoning_content": part.text}
        if self._calls and self._one_call:
            return None
        call = {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
        self._calls.append(call)
        return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}

    def _chunk(self, delta: dict[str, object]) -> dict[str, object]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}


class ChatJob:
    def __init__(self, asked: ChatRequest, model: str, requests: Sequence[Request], choices: Sequence[ChatChoice]):
        self.requests = requests
        self.stream = bool(asked.stream)
        self.wants_usage = asked.wants_usage
        self.choices_per_prompt = len(requests)
        self._choices = choices
        self._envelope = Envelope("chatcmpl", "chat.completion.chunk", model)

    def opening(self) -> Sequence[dict[str, object]]:
        return [self._envelope.around([choice.opening()]) for choice in self._choices]

    def take(self, index: int, event: Event) -> Sequence[dict[str, object]]:
        return [self._envelope.around([chunk]) for chunk in self._choices[index].take(event)]

    def whole(self, usage: dict[str, object]) -> dict[str, object]:
        choices = [choice.whole() for choice in self._choices]
        return {**self._envelope.around(choices, "chat.completion"), "usage": usage}

    def usage_chunk(self, usage: dict[str, object]) -> dict[str, object]:
        return {**self._envelope.around([]), "usage": usage}
