"""Help pages: at most 80 columns in any script, and in the user's language also where typer speaks."""

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from rich.cells import cell_len

from kt_kernel.cli.language import CHINESE, language, t, translated

if TYPE_CHECKING:
    from typer.core import TyperCommand, TyperGroup

_FIRST_COLUMN = 30
_SPACES = 2
# What typer calls the types of values.
_TYPES = {"int": "N", "float": "X", "str": "TEXT", "path": "PATH"}
_TYPE = re.compile(r"<(list\[)?(int|float|str|path)\]?( range)?>", re.IGNORECASE)
# Where a line may be broken: at spaces, not in brackets, and behind Chinese characters with what may not begin a line.
_WIDE = "\u2e80-\u303f\u3400-\u9fff\uff00-\uffef"
_CLOSING = "，。；：？！、）》」』”’"  # noqa: RUF001
_PIECES = re.compile(rf"\[[^]]*\]|[{_WIDE}][{_CLOSING}]*|[^\s{_WIDE}]+[{_CLOSING}]*|\s+")


def prepare(command: "TyperCommand | TyperGroup") -> None:
    """Gives a command, and those below it, texts of the user's language and pages of ours."""
    command.help = translated(command.help or "")
    command.short_help = first_sentence(command.help)
    command.context_class = _context_class(command.context_class)
    for parameter in command.params:
        if getattr(parameter, "help", None):
            parameter.help = translated(parameter.help)
    for child in getattr(command, "commands", {}).values():
        prepare(child)


def usage_error(command: str, message: str) -> str:
    """One line of what typer says."""
    if "\n" in message:  # a group without a command is answered with its help
        return message
    message = message.rstrip(".")
    if not message.endswith("?"):  # 'Did you mean ...?' is help already
        message = t("{message}; see '{command} --help'", message=message, command=command)
    if language() == CHINESE:
        from kt_kernel.cli.chinese.help import USAGE

        for english, chinese in USAGE:
            message = re.sub(english, chinese, message)
    return f"{command}: {message}"


def first_sentence(text: str) -> str:
    sentence = re.match(r"(.*?)(\.(?=\s|$)|(?=。)|(?=\n\n)|$)", text, re.DOTALL)[1]
    return " ".join(sentence.split())


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns, in which Chinese characters take two. Longer words are broken at commas."""
    lines, line = [], ""
    words = _PIECES.findall(" ".join(text.split()))
    for piece in (part for word in words for part in _broken(word, width)):
        if line and cell_len(line + piece) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece if line or not piece.isspace() else ""
    return [*lines, line.rstrip()] if line.strip() else lines


def _broken(word: str, width: int) -> list[str]:
    if cell_len(word) <= width:
        return [word]
    parts = re.findall(r"[^,]*,|[^,]+", word)
    return [part[at : at + width] for part in parts for at in range(0, len(part), width)]


@cache
def _context_class(base: type) -> type:
    class Formatter(base.formatter_class):
        """As typer's, except that it knows the width of characters. Behind a line with \\b, lines stay as they are."""

        def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
            super().write_usage(prog, args, translated("Usage: ") if prefix is None else prefix)

        def write_heading(self, heading: str) -> None:
            self.write(f"{' ' * self.current_indent}{translated(f'{heading}:')}\n")

        def write_text(self, text: str) -> None:
            indent = " " * self.current_indent
            paragraphs = []
            for paragraph in re.split(r"\n\s*\n", text):
                first, *lines = paragraph.split("\n")
                if first.strip() != "\b":
                    lines = wrap(paragraph, self.width - len(indent))
                paragraphs.append("\n".join(indent + line for line in lines))
            self.write("\n\n".join(paragraphs) + "\n")

        def write_dl(self, rows: Sequence[tuple[str, str]], *_) -> None:
            rows = [(_with_type(first), _with_default(second)) for first, second in rows]
            longest = max(cell_len(first) for first, _ in rows)
            column = min(longest, _FIRST_COLUMN, self.width * 2 // 5) + _SPACES
            indent = " " * self.current_indent
            for first, second in rows:
                lines = wrap(second, self.width - len(indent) - column) or [""]
                if cell_len(first) > column - _SPACES:
                    lines.insert(0, "")
                lines[0] = first + " " * (column - cell_len(first)) + lines[0]
                lines[1:] = [" " * column + line for line in lines[1:]]
                self.write("".join(f"{indent}{line}".rstrip() + "\n" for line in lines))

    class Context(base):
        formatter_class = Formatter

    return Context


def _with_type(option: str) -> str:
    return _TYPE.sub(lambda found: _TYPES[found[2].lower()], option)


def _with_default(text: str) -> str:
    """The text of an option, and what typer adds behind it."""
    own, bracket, added = text.rpartition("  [") if text.endswith("]") else (text, "", "")
    if not bracket:
        return translated(text)
    added = added.replace("default: ", translated("default: ")).replace("required", translated("required"))
    return f"{own}{bracket}{added}"
