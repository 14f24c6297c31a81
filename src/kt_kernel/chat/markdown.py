"""Markdown that is drawn while it is written.

Only the last block (a paragraph, a list, a fence) can still change: those before it are printed once, for good, and
scroll away as any text does. The last one is drawn again in place, as much of its end as the screen holds, and printed
whole once it is finished. So the screen and the terminal's scrollback hold every line once.
"""

import time
from itertools import accumulate, pairwise
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderResult
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


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type]] = {**Markdown.elements, "heading_open": _LeftHeading}

    def __init__(self, text: str):
        super().__init__(text, hyperlinks=False)  # not every terminal shows where a link leads
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                # Models end lines where they want them to end.
                child.type = "hardbreak" if child.type == "softbreak" else child.type


class _Block:
    """A block without the empty lines that rich puts around some; `gap`: behind one, as all blocks have them."""

    def __init__(self, text: str, gap: bool, whole: bool = True):
        self._text = text
        self._gap = gap
        self._whole = whole  # else the last lines, as many as the screen holds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_Markdown(self._text), options.update(height=None), pad=False)
        written = [number for number, line in enumerate(lines) if any(part.text.strip() for part in line)]
        lines = lines[written[0] : written[-1] + 1] if written else []
        if self._gap and lines:
            lines.insert(0, [])
        for line in lines if self._whole else lines[-max(1, console.height - 2) :]:
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
        self._live.update(_Block("", gap=False))
        self._live.stop()
        self._print(blocks(self._text + "\n"))

    def _draw(self) -> None:
        *done, self._text = blocks(self._text)
        printed = self._printed or any(map(str.strip, done))
        self._live.update(_Block(self._text, gap=printed, whole=False))
        if not self._print(done):
            self._live.refresh()

    def _print(self, done: list[str]) -> bool:
        """All in one, as each print draws what is below again. False where there is nothing to print."""
        shown = []
        for text in filter(str.strip, done):
            shown.append(_Block(text, gap=self._printed))
            self._printed = True
        if shown:
            self._console.print(Group(*shown), end="")
        return bool(shown)
