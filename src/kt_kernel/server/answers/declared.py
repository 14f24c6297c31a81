"""Answers in a form that the tokenizer declares: transformers finds their regions, here these become parts."""

import json
from collections.abc import Iterable, Mapping, Sequence

from kt_kernel.engine.api import RegionParser
from kt_kernel.server.answers.parts import Call, Content, Part, Reasoning, new_id

_REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})


class Declared:
    """White space at the edges of a region is dropped; a region that transformers cannot read is shown as text."""

    def __init__(self, parser: RegionParser, with_tools: bool):
        self._parser: RegionParser | None = parser
        self._with_tools = with_tools
        self._unshown = ""  # what came since the last part, as it was written
        self._region = ""  # what came of the region that is open, without marks
        self._space = ""  # white space that is dropped if the region ends with it
        self._begun = False

    def feed(self, text: str) -> Sequence[Part]:
        if self._parser is None:
            return [Content(text)] if text else []
        self._unshown += text
        try:
            parts = list(self._parts(self._parser.feed(text)))
        except (ValueError, TypeError, LookupError, RecursionError):
            return self._give_up()
        for part in parts:
            shown = "" if isinstance(part, Call) else part.text
            self._unshown = self._unshown.partition(shown)[2] if shown else ""
        return parts

    def end(self) -> Sequence[Part]:
        if self._parser is None:
            return []
        try:
            return list(self._parts(self._parser.finalize()[1]))
        except (ValueError, TypeError, LookupError, RecursionError):
            return self._give_up()

    def _give_up(self) -> Sequence[Part]:
        """What is left is shown as it is."""
        self._parser = None
        return [Content(self._unshown)] if self._unshown.strip() else []

    def _parts(self, events: Iterable[Mapping[str, object]]) -> Iterable[Part]:
        for event in events:
            kind, field = event["type"], str(event["field"])
            if kind == "region_open":
                self._region, self._space, self._begun = "", "", False
            elif kind == "region_chunk":
                self._region += event["text"]
                if not event["dirty"] and field != "tool_calls":
                    yield from self._shown(event["text"], Reasoning if field in _REASONING else Content)
            elif field == "tool_calls" and self._with_tools:
                yield from _calls(event["value"])
            elif field == "tool_calls":
                yield Content(self._region)

    def _shown(self, text: str, part: type[Content] | type[Reasoning]) -> Iterable[Part]:
        text = self._space + text
        if not self._begun:
            text = text.lstrip()
        sure = text.rstrip()
        self._space = text[len(sure) :]
        if sure:
            self._begun = True
            yield part(sure)


def _calls(value: object) -> Iterable[Call]:
    for found in value if isinstance(value, list) else [value]:
        function = found.get("function", found) if isinstance(found, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("a call without a name")
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        yield Call(function["name"], arguments, str(found.get("id") or new_id()))
