"""Markdown that is drawn while it is written ends as it would have been drawn at once."""

import io

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kt_kernel.chat import markdown
from kt_kernel.chat.markdown import MarkdownStream, blocks, printable

TEXT = """# A title

Words in *italics*, **bold** and `code`,
on two lines. [A link](http://there.example/x).

1. one

2. two

   still two

- a
  - b

```python
def f():

    return 1
```

| a | b |
|---|---|
| 1 | 2 |

<b>no tag</b>
***
> said
"""


def drawn_at_once(text: str, columns: int = 60) -> list[str]:
    console = Console(file=io.StringIO(), width=columns, height=1000, force_terminal=False)
    with MarkdownStream(console) as stream:
        stream.feed(text)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def drawn_in_pieces(pieces: list[str], columns: int = 60, rows: int = 12) -> list[str]:
    """What a terminal of this size shows in the end, and what scrolled away before."""
    file = io.StringIO()
    console = Console(file=file, width=columns, height=rows, force_terminal=True, legacy_windows=False)
    screen = pyte.HistoryScreen(columns, rows, history=5000, ratio=0.5)
    terminal = pyte.Stream(screen)
    screen.set_mode(pyte.modes.LNM)  # the line discipline: a new line is also a return
    with MarkdownStream(console) as stream:
        for piece in pieces:
            stream._next = 0.0
            stream.feed(piece)
            terminal.feed(file.getvalue())
            file.seek(0)
            file.truncate()
    terminal.feed(file.getvalue())
    gone = ["".join(row[column].data for column in range(columns)).rstrip() for row in screen.history.top]
    return gone + [line.rstrip() for line in screen.display]


def without_end(lines: list[str]) -> list[str]:
    while lines and not lines[-1]:
        lines.pop()
    return lines


@pytest.mark.parametrize("size", [1, 3, 7, 50])
def test_pieces_end_as_the_whole(size):
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    assert without_end(drawn_in_pieces(pieces)) == without_end(drawn_at_once(TEXT))


def test_one_empty_line_between_blocks():
    text = "a\n\n```c\nint x;\n```\n\n| a |\n|---|\n| 1 |\n\n> said\n\n1. one\n\nlast, without an end"
    shown = ["a", "", " int x;", "", " a", " ─", " 1", "", "▌ said", "", " 1 one", "", "last, without an end"]
    assert drawn_at_once(text) == shown
    assert without_end(drawn_in_pieces(list(text))) == shown


def test_a_block_longer_than_the_screen_is_there_once():
    code = "```\n" + "".join(f"line {i}\n" for i in range(40)) + "```\n"
    lines = drawn_in_pieces([code[at : at + 9] for at in range(0, len(code), 9)])
    assert [line.strip() for line in lines if line.strip()] == [f"line {i}" for i in range(40)]


@given(
    st.lists(st.sampled_from([*TEXT.split("\n\n"), "\n\n", "\n", "* x", "```", "  y", "1. z", "| q |"]), max_size=12)
)
def test_what_is_finished_stays_as_it_is(parts):
    text = "\n".join(parts) + "\n"
    cut = blocks(text)
    assert "".join(cut) == text
    assert blocks(text + "\n\nand *more*\n")[: len(cut) - 1] == cut[:-1]


def test_a_list_is_not_finished_by_half_a_line():
    assert blocks("1. a\n\n2") == ["1. a\n\n2"]
    assert blocks("1. a\n\n2. b\n") == ["1. a\n\n2. b\n"]
    assert blocks("1. a\n\nb\n") == ["1. a\n\n", "b\n"]
    assert blocks("") == [""]


def test_tags_line_ends_and_links_are_seen():
    lines = drawn_at_once("<think>x</think>\nnext [a](http://b.example)")
    assert lines == ["<think>x</think>", "next a (http://b.example)"]


def test_an_answer_cannot_command_the_terminal():
    assert printable("a\x1b]0;title\x07b\r\n\tc\x9b2J") == "a�]0;title�b\n\tc�2J"
    assert "\x1b" not in "".join(drawn_at_once("a\x1b[2Jb"))


def test_drawing_leaves_time_for_the_model(monkeypatch):
    """On a slow terminal fewer pictures are drawn, not all of them later."""
    now = [0.0]
    monkeypatch.setattr(markdown.time, "monotonic", lambda: now[0])
    stream = MarkdownStream(Console(file=io.StringIO(), width=60, height=10))
    pictures = []

    def draw():
        pictures.append(now[0])
        now[0] += 0.1

    monkeypatch.setattr(stream, "_draw", draw)
    for _ in range(100):
        stream.feed("x")
        now[0] += 0.02
    assert 4 <= len(pictures) <= 6
