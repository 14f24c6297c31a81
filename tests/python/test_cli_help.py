"""Help pages and errors of usage, of every command there is, in both languages."""

import os
import re
import subprocess
import sys

import pytest
from rich.cells import cell_len
from terminal import COMMAND, environment, terminal

from kt_kernel.cli import help, language
from kt_kernel.cli.main import command, main

ESCAPE = "\x1b"


def walk(found, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    children = getattr(found, "commands", {})
    return [path, *(one for name, child in children.items() for one in walk(child, (*path, name)))]


PAGES = walk(command())
LEAVES = [path for path in PAGES if not any(other[: len(path)] == path and other != path for other in PAGES)]


def kt(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return end.value.code, *capsys.readouterr()


@pytest.fixture(params=["en", "zh"])
def tongue(request, home, monkeypatch):
    monkeypatch.setenv("KT_LANG", request.param)
    monkeypatch.setenv("COLUMNS", "80")
    language.language.cache_clear()
    yield request.param
    language.language.cache_clear()


@pytest.mark.parametrize("path", PAGES, ids=" ".join)
def test_a_page_fits_and_says_all(capsys, tongue, path):
    code, page, errors = kt(capsys, *path, "--help")
    assert (code, errors) == (0, "")
    assert [line for line in page.splitlines() if cell_len(line) > 80] == []
    assert page.startswith("Usage: kt" if tongue == "en" else "用法：kt")
    assert not re.search(r"<(list|int|float|str|path)\b", page), "a type in typer's words"
    assert ESCAPE not in page
    if tongue == "zh":
        assert not re.search(r"Options:|Commands:|Arguments:|default: |Show this message", page)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_a_page_has_an_example(capsys, home, path):
    page = kt(capsys, *path, "--help")[1]
    assert re.search(rf"^ +.*\bkt {' '.join(path)}", page.partition("\n")[2], re.MULTILINE), page


def test_kt_alone_is_its_help(capsys, home):
    assert kt(capsys)[:2] == kt(capsys, "--help")[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "kt: No such command 'rnu'. Did you mean 'run'?"),
        (["xyzzy"], "kt: No such command 'xyzzy'; see 'kt --help'"),
        (["bench", "kernls"], "kt bench: No such command 'kernls'. Did you mean 'kernels'?"),
        (["chat", "--prot", "1"], "kt chat: No such option: --prot"),
        (["chat", "--port", "x"], "kt chat: Invalid value for '--port'"),
        (["chat", "more"], "kt chat: Got unexpected extra argument"),
    ],
)
def test_wrong_usage_is_one_line_that_helps(capsys, home, arguments, message):
    code, out, errors = kt(capsys, *arguments)
    assert (code, out) == (2, "")
    assert errors.startswith(message)
    assert errors.count("\n") == 1


def test_wrong_usage_in_chinese(capsys, home, monkeypatch):
    monkeypatch.setenv("KT_LANG", "zh")
    language.language.cache_clear()
    try:
        assert kt(capsys, "rnu")[2] == "kt: 没有命令 'rnu'。是不是 'run'？\n"
        assert kt(capsys, "chat", "--port", "70000")[2] == (
            "kt chat: '--port' / '-p' 的值无效：不能大于 65535；见 'kt chat --help'\n"
        )
        assert kt(capsys, "chat", "--host")[2] == "kt chat: 选项 '--host' 需要一个值；见 'kt chat --help'\n"
    finally:
        language.language.cache_clear()


def test_nobody_reads_along(tmp_path):
    """A pipe that is closed, at once or later, is no reason to complain."""
    for arguments in ([], ["chat", "--help"]):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "wb") as closed:
            said = subprocess.run(
                [sys.executable, "-c", COMMAND, *arguments],
                stdout=closed,
                stderr=subprocess.PIPE,
                env=environment(tmp_path),
            )
        assert (said.returncode, said.stderr) == (1, b"")


@pytest.mark.parametrize("columns", [80, 50, 200])
def test_a_terminal_of_any_width(tmp_path, columns):
    with terminal(tmp_path, "chat", "--help", columns=columns, rows=60) as page:
        assert page.exit_code() == 0
        assert "KT_KERNEL_API_KEY" in page.text


def test_wrap():
    assert help.wrap("aa bb  cc\ndd", 5) == ["aa bb", "cc dd"]
    assert help.wrap("toolong a", 3) == ["too", "lon", "g a"]
    assert help.wrap("bf16,int8,int4 x", 10) == ["bf16,int8,", "int4 x"]
    assert help.wrap("你好，世界", 6) == ["你好，", "世界"]
    assert help.wrap("", 5) == []


def test_first_sentence():
    assert help.first_sentence("A model of 1.5 B. And more.") == "A model of 1.5 B"
    assert help.first_sentence("一句。两句。") == "一句"
    assert help.first_sentence("no end\nhere\n\nnext") == "no end here"
    assert help.first_sentence("") == ""
