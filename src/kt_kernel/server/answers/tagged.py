"""Answers whose reasoning and calls stand between marks in the text."""

from collections.abc import Sequence
from enum import Enum, auto

from kt_kernel.server.answers.parts import Content, Part, Reasoning, Schemas, find_first, held_back
from kt_kernel.server.answers.tool_forms import ToolForm


class _In(Enum):
    START = auto()  # undecided: reasoning, a whole answer that is a call, or text
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class Tagged:
    """Takes reasoning from the beginning of an answer, and calls from anywhere behind it.

    Text is passed on as soon as it cannot become a mark any more. White space next to a mark belongs to the mark.
    """

    def __init__(
        self,
        thinking: tuple[str, str] | None = None,
        form: ToolForm | None = None,
        schemas: Schemas | None = None,
        *,
        inside: bool = False,
    ):
        """``inside``: the prompt ended with the mark that opens reasoning."""
        self._thinking = thinking
        self._form = form
        self._schemas = schemas or {}
        self._text = ""
        self._trim = inside  # white space that follows a mark
        self._state = _In.REASONING if inside else _In.START
        self._mark = ""  # that opened a call, in case it is none

    def feed(self, text: str) -> Sequence[Part]:
        self._text += text
        parts: list[Part] = []
        step = {
            _In.START: self._start,
            _In.REASONING: self._reasoning,
            _In.CONTENT: self._content,
            _In.CALL: self._call,
        }
        while step[self._state](parts):
            pass
        return parts

    def end(self) -> Sequence[Part]:
        text, self._text = self._text, ""
        if self._state is _In.CALL:
            return self._read(text)
        if self._state is _In.REASONING:
            text = text.rstrip()
            return [Reasoning(text)] if text else []
        if self._trim:
            text = text.lstrip()
        return [Content(text)] if text else []

    def _start(self, parts: list[Part]) -> bool:
        opening = [self._thinking[0]] if self._thinking else []
        whole = list(self._form.begin) if self._form and self._form.whole else []
        seen = self._text.lstrip()
        for marker in opening + whole:
            if seen.startswith(marker):
                if marker in opening:
                    self._text = seen[len(marker) :]
                    self._trim = True
                    self._state = _In.REASONING
                else:
                    self._state = _In.CALL
                return True
        if any(marker.startswith(seen) for marker in opening + whole):
            return False
        self._state = _In.CONTENT
        return True

    def _reasoning(self, parts: list[Part]) -> bool:
        close = self._thinking[1]
        before, mark, after = self._text.partition(close)
        if self._trim:
            before = before.lstrip()
            self._trim = not before
        if mark:
            if before.rstrip():
                parts.append(Reasoning(before.rstrip()))
            self._text = after
            self._trim = True
            # An answer may still be a call as a whole.
            self._state = _In.START
            self._thinking = None
            return True
        self._pass_on(parts, before, [close], Reasoning)
        return False

    def _content(self, parts: list[Part]) -> bool:
        if self._trim:
            self._text = self._text.lstrip()
            self._trim = not self._text
        marks = self._form.begin if self._form and not self._form.whole else ()
        found = find_first(self._text, marks)
        if found is None:
            self._pass_on(parts, self._text, marks, Content)
            return False
        at, self._mark = found
        before = self._text[:at].rstrip()
        if before:
            parts.append(Content(before))
        self._text = self._text[at + len(self._mark) :]
        self._state = _In.CALL
        return True

    def _call(self, parts: list[Part]) -> bool:
        end = self._form.end
        if end is None or end not in self._text:
            return False
        inside, _, self._text = self._text.partition(end)
        parts.extend(self._read(inside, end))
        self._mark = ""
        self._trim = True
        self._state = _In.CONTENT
        return True

    def _read(self, text: str, end: str = "") -> Sequence[Part]:
        try:
            return self._form.read(text, self._schemas)
        # Python's parser gives up on deep nesting with the last two.
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            said = self._mark + text + end
            return [Content(said)] if said.strip() else []

    def _pass_on(
        self, parts: list[Part], text: str, marks: Sequence[str], kind: type[Content] | type[Reasoning]
    ) -> None:
        """All of the text but what may belong to a mark: the beginning of one, and white space before it."""
        sure = text[: len(text) - held_back(text, marks)]
        if marks:
            sure = sure.rstrip()
        if sure:
            parts.append(kind(sure))
        self._text = text[len(sure) :]
