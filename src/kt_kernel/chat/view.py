"""Where answers go: a terminal that can draw, or a stream of plain text."""

from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

from kt_kernel.chat.markdown import MarkdownStream, printable
from kt_kernel.chat.server import Piece
from kt_kernel.cli.language import t


class View(Protocol):
    """Takes the pieces of one answer after another; each answer is one `with`."""

    def __enter__(self) -> "View": ...
    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
    def show(self, piece: Piece) -> None: ...


class PlainView:
    """Text as it comes. Reasoning is no part of what a pipe or file is for."""

    def __init__(self, stream: TextIO, reasoning: bool):
        self._stream = stream
        self._with_reasoning = reasoning
        self._in_reasoning = False
        self._line_ended = True

    def __enter__(self) -> "PlainView":
        self._in_reasoning, self._line_ended = False, True
        return self

    def __exit__(self, *_) -> None:
        if not self._line_ended:
            self._write("\n")

    def show(self, piece: Piece) -> None:
        if piece.reasoning and self._with_reasoning:
            self._in_reasoning = True
            self._write(piece.reasoning)
        if piece.content:
            if self._in_reasoning:
                self._write("\n\n")
                self._in_reasoning = False
            self._write(piece.content)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
        self._line_ended = text.endswith("\n")


class TerminalView:
    """A spinner until the first token, reasoning dimmed, the answer as Markdown."""

    def __init__(self, console: Console):
        self._console = console
        self._now = ExitStack()  # what is drawn at the moment: nothing, the spinner, or the answer
        self._answer: MarkdownStream | None = None
        self._in_reasoning = False

    def __enter__(self) -> "TerminalView":
        self._answer, self._in_reasoning = None, False
        self._now.enter_context(self._console.status(t("waiting for the first token"), spinner="dots"))
        return self

    def __exit__(self, *_) -> None:
        self._now.close()
        if self._in_reasoning:
            self._console.print()

    def show(self, piece: Piece) -> None:
        if piece.reasoning and self._answer is None:
            self._now.close()
            self._in_reasoning = True
            self._console.print(Text(printable(piece.reasoning), style="dim"), end="", soft_wrap=True)
        if piece.content:
            if self._answer is None:
                self._begin_answer()
            self._answer.feed(piece.content)

    def _begin_answer(self) -> None:
        self._now.close()
        if self._in_reasoning:
            self._console.print("\n")
            self._in_reasoning = False
        self._answer = self._now.enter_context(MarkdownStream(self._console))
