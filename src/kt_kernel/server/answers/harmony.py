"""Answers in the form of gpt-oss: messages, each with a channel and perhaps the tool that it is for.

<|channel|>analysis<|message|>...<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>...
"""

import json
import re
from collections.abc import Sequence

from kt_kernel.server.answers.parts import Call, Content, Part, Reasoning, find_first, held_back, new_id

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADER = ("<|channel|>", "<|start|>")


class Harmony:
    """analysis is reasoning, what is sent to functions.* are calls, the rest is text."""

    def __init__(self, with_tools: bool):
        self._with_tools = with_tools
        self._text = ""
        self._header = True
        self._kind: type[Content] | type[Reasoning] = Content
        self._tool: str | None = None

    def feed(self, text: str) -> Sequence[Part]:
        self._text += text
        parts: list[Part] = []
        while self._read_header() if self._header else self._read_body(parts):
            pass
        return parts

    def end(self) -> Sequence[Part]:
        text, self._text = self._text, ""
        if self._header or not text:
            return []
        return self._call(text) if self._tool else [self._kind(text)]

    def _read_header(self) -> bool:
        head, mark, rest = self._text.partition(_MESSAGE)
        if not mark:
            seen = self._text.lstrip()
            if seen and not any(seen.startswith(m) or m.startswith(seen) for m in (*_HEADER, "assistant")):
                # Without a header it is an answer in plain text.
                self._header = False
                return True
            return False
        channel = re.search(r"<\|channel\|>\s*(\w+)", head)
        tool = re.search(r"to=functions\.([\w.\-]+)", head)
        self._kind = Reasoning if channel and channel[1] == "analysis" else Content
        self._tool = tool[1] if tool and self._with_tools else None
        self._text = rest
        self._header = False
        return True

    def _read_body(self, parts: list[Part]) -> bool:
        found = find_first(self._text, _ENDS)
        if found is None:
            if not self._tool:
                sure = self._text[: len(self._text) - held_back(self._text, _ENDS)]
                self._text = self._text[len(sure) :]
                if sure:
                    parts.append(self._kind(sure))
            return False
        at, mark = found
        body = self._text[:at]
        self._text = self._text[at + (0 if mark == "<|start|>" else len(mark)) :]
        if body:
            parts.extend(self._call(body) if self._tool else [self._kind(body)])
        self._tool = None
        self._header = True
        return True

    def _call(self, text: str) -> Sequence[Part]:
        try:
            arguments = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return [Content(text)]
        return [Call(self._tool, json.dumps(arguments, ensure_ascii=False), new_id())]
