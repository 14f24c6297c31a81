"""Markdown that is drawn while it is written.

Only the last block (a paragraph, a list, a fence) can still change: those before it are printed once, for good, and
scroll away as any text does. The last one is drawn again in place, as much of its end as the screen holds, and printed
whole once it is finished. So the screen and the terminal's scrollback hold every line once.
"""

import time
from itertools import accumulate, pairwise
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment

_INTERVAL = 0.08  # seconds between two drawings
_SHARE = 0.2  # of the time at most is spent on drawing: the model may compute on the same cores
# Tags would vanish: rich draws no HTML.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
_CONTROLS = {code: "�" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t\r"} | {ord("\r"): None}


def printable(text: str) -> str:
    """Without what could move the cursor or command the terminal."""
    return text.translate(_CONTROLS)


def blocks(text: str) -> list[str]:
    """The text cut where its blocks begin. A line without its end may become anything: it belongs to the last block."""
    whole = text[: text.rfind("\n") + 1]
    ends = list(accumulate(len(line) + 1 for line in whole.split("\n")))
    tokens = [token for token in _PARSER.parse(whole) if token.level == 0 and token.nesting >= 0 and token.map]
    cuts = [0, *(ends[token.map[0] - 1] for token in tokens[1:]), len(text)]
    return [text[begin:end] for begin, end in pairwise(cuts)]


class _LeftHeading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, str]] = {}


class _Block(Markdown):
    elements: ClassVar[dict[str, type]] = {**Markdown.elements, "heading_open": _LeftHeading}

    def __init__(self, text: str):
        super().__init__(text, hyperlinks=False)  # not every terminal shows where a link leads
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                # Models end lines where they want them to end.
                child.type = "hardbreak" if child.type == "softbreak" else child.type


class _Tail:
    """The last lines of a block that fit on the screen."""

    def __init__(self, text: str, gap: bool):
        self._text = text
        self._gap = gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._text.strip():
            return
        lines = console.render_lines(_Block(self._text), options.update(height=None), pad=False)
        if self._gap:
            lines = [[], *lines]
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


class MarkdownStream:
    """Use as a context manager; what was fed is on the screen, whole, at its end, however it ends."""

    def __init__(self, console: Console):
        self._console = console
        self._text = ""
        self._printed = False
        self._next = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible")

    def feed(self, text: str) -> None:
        self._text += printable(text)
        started = time.monotonic()
        if started >= self._next:
            self._draw()
            ended = time.monotonic()
            self._next = ended + max(_INTERVAL, (ended - started) / _SHARE)

    def __enter__(self) -> "MarkdownStream":
        self._live.start()
        return self

    def __exit__(self, *_) -> None:
        self._live.update(_Tail("", gap=False))
        self._live.stop()
        self._print(blocks(self._text))

    def _draw(self) -> None:
        *done, self._text = blocks(self._text)
        self._live.update(_Tail(self._text, gap=self._printed or bool(done)))
        if done:
            self._print(done)
        else:
            self._live.refresh()

    def _print(self, done: list[str]) -> None:
        """All in one, as each print draws what is below again."""
        shown: list[str | _Block] = [""] if self._printed else []
        for block in done:
            if block.strip():
                shown += [_Block(block), ""]
        if len(shown) > 1:
            self._console.print(*shown[:-1])
            self._printed = True
