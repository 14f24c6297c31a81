"""Pages of docs/: those that are written from the code are not stale, links lead somewhere, every page is in the index,
and the commands they show exist, with their options.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"])


def test_what_runs_where_is_not_stale():
    pytest.importorskip("transformers", reason="transformers is not installed: docs/support.md was not compared")
    command = [sys.executable, ROOT / "tools/support_page.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


def test_every_page_is_in_the_index_and_in_the_site():
    index, site = ((ROOT / name).read_text() for name in ("docs/index.md", "mkdocs.yml"))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\((\w+\.md)\)", index))
    assert pages | {"index.md"} == set(re.findall(r"^  - (\w+\.md)$", site, re.MULTILINE))


def shown_commands(page: Path) -> list[str]:
    """Lines of the blocks that are for a shell; a line that ends in a backslash goes on."""
    blocks = re.findall(r"^```(?:sh|bash|)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [
        line.strip()
        for line in lines
        if re.match(r"(\w+=\S+ )*(kt|make|\./install\.sh|python3? scripts/)\b", line.strip())
    ]


def words_of(line: str) -> list[str]:
    """Of the first command of a line, without variables, comments and redirections."""
    words = shlex.split(line, comments=True)
    while re.match(r"\w+=", words[0]):
        words.pop(0)
    end = next((at for at, word in enumerate(words) if word in ("|", "&&", ";", ">", "2>", "&")), len(words))
    return words[:end]


def kt_command(words: list[str]):
    """The click command that a line means, and the words that are left."""
    import typer

    from kt_kernel.cli import main

    command, rest = main.command(words[1] if len(words) > 1 else None), words[1:]
    while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
        found = command.get_command(typer.Context(command), rest[0])
        assert found is not None, f"{' '.join(words)}: there is no '{rest[0]}'"
        command, rest = found, rest[1:]
    return command, rest


def check_options(words: list[str]) -> None:
    command, rest = kt_command(words)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    known |= {"--install-completion", "--show-completion"}
    if command.ignore_unknown_options:
        return
    unknown = [word for word in rest if re.match(r"--?[a-zA-Z]", word) and word.partition("=")[0] not in known]
    assert unknown == [], f"{' '.join(words)}: no such options"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_that_are_shown_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in shown_commands(page):
        words = words_of(line)
        if words[0] == "kt":
            check_options(words)
        elif words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, line
        elif words[0] == "./install.sh":
            assert set(words[1:]) <= {"deps", "build", "all", "--manual", "--no-clean", "--help"}, line
        else:
            script = ROOT / words[1]
            helped = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True).stdout
            missing = [word for word in words if word.startswith("--") and word not in helped]
            assert missing == [], line


def test_a_command_that_does_not_exist_is_noticed():
    for wrong in ("kt plan demo --fast-as-light", "kt modle list", "kt bench kernels --tokns 1"):
        with pytest.raises(AssertionError):
            check_options(words_of(wrong))
