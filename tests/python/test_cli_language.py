"""English and Chinese: which one is chosen, and that nothing is left untranslated."""

import ast
import importlib
import json
import os
import re
import string
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from kt_kernel import cli, settings
from kt_kernel.cli import chinese, language
from kt_kernel.cli.language import t

SOURCES = Path(cli.__file__).parent
CHINESE = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture
def choose(home, monkeypatch):
    """Sets variables and tells the language; what is chosen is forgotten at the end."""
    for name in ("KT_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)

    def chosen(**variables: str) -> str:
        language.language.cache_clear()
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return language.language()

    yield chosen
    language.language.cache_clear()


def test_which_language(choose):
    assert choose() == "en"
    assert choose(LANG="zh_CN.UTF-8") == "zh"
    assert choose(LC_ALL="C") == "en"
    settings.set("general.language", "zh")
    assert choose() == "zh"
    assert choose(KT_LANG="en") == "en"
    assert choose(KT_LANG="de") == "en"


def test_broken_settings_do_not_keep_kt_from_talking(choose, home):
    settings.path().parent.mkdir(parents=True)
    settings.path().write_text("[")
    assert choose(LANG="zh_CN") == "zh"


def test_values_are_put_in_and_unknown_texts_stay_english(choose, monkeypatch):
    monkeypatch.setattr(chinese, "texts", lambda: {"no {thing}": "没有{thing}"})
    choose(KT_LANG="zh")
    assert t("no {thing}", thing="x") == "没有x"
    assert t("some {thing}", thing="x") == "some x"
    assert t("a {brace}") == "a {brace}"
    choose(KT_LANG="en")
    assert t("no {thing}", thing="x") == "no x"


def calls() -> list[tuple[str, ast.Call]]:
    """Every t(...) of the package."""
    found = []
    for path in sorted(SOURCES.parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "t":
                found.append((f"{path.relative_to(SOURCES.parent)}:{node.lineno}", node))
    return found


def test_texts_are_literals_and_their_names_are_given():
    for where, call in calls():
        assert len(call.args) == 1, where
        text = call.args[0]
        assert isinstance(text, ast.Constant), f"{where}: t() needs a literal; put what changes into {{names}}"
        given = {keyword.arg for keyword in call.keywords}
        assert given == (placeholders(text.value) if given else set()), where


def placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_every_text_has_its_chinese():
    missing = [where + " " + call.args[0].value for where, call in calls() if call.args[0].value not in chinese.texts()]
    assert missing == []


def test_translations_have_the_same_names_and_are_chinese():
    for english, translated in chinese.texts().items():
        if "{" in english and placeholders(english):
            assert placeholders(english) == placeholders(translated), english
        assert CHINESE.search(translated), english


def test_one_text_has_one_translation():
    found = defaultdict(set)
    for name in chinese.modules():
        for english, translated in importlib.import_module(f"kt_kernel.cli.chinese.{name}").TEXTS.items():
            found[english].add(translated)
    assert {english: both for english, both in found.items() if len(both) > 1} == {}


SHOW_HELP = """
import json
from kt_kernel.cli.main import command
def texts(command, path):
    yield path, command.help
    for parameter in command.params:
        yield f"{path} {parameter.opts[-1]}", getattr(parameter, "help", None)
    for name, child in getattr(command, "commands", {}).items():
        yield from texts(child, f"{path} {name}")
print(json.dumps(list(texts(command(), "kt"))))
"""


def test_every_help_text_is_translated():
    """Of the commands that have a module of translations."""
    environment = {**os.environ, "KT_LANG": "zh"}
    run = [sys.executable, "-c", SHOW_HELP]
    shown = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    commands = [*chinese.modules(), ""]
    texts = [(where, text) for where, text in json.loads(shown) if [*where.split(), ""][1] in commands]
    assert [(where, text) for where, text in texts if text is None or not CHINESE.search(text)] == []
