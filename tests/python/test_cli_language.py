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
from functools import lru_cache
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


# What takes a text for people: t(), and phrases, which are said later.
SPEAKING = {"t", "Phrase", "UserError", "SettingsError", "YamlFileError", "DownloadError"}


@lru_cache(1)
def calls() -> list[tuple[str, ast.Call]]:
    """Every call that takes a text, but of errors that are no phrases."""
    found = []
    for path in sorted(SOURCES.parent.rglob("*.py")):
        text = path.read_text()
        names = (
            SPEAKING if "kt_kernel.errors" in text or path.name == "settings.py" or "YamlFileError" in text else {"t"}
        )
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                found.append((f"{path.relative_to(SOURCES.parent)}:{node.lineno}", node))
    return found


def test_texts_are_literals_and_their_names_are_given():
    for where, call in calls():
        text, given = call.args[0], {keyword.arg for keyword in call.keywords}
        if not isinstance(text, ast.Constant) and call.func.id != "t":
            continue  # an error of a library, which is handed on
        assert len(call.args) == 1, where
        assert isinstance(text, ast.Constant), f"{where}: t() needs a literal; put what changes into {{names}}"
        assert given == (placeholders(text.value) if given else set()), where


def placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_every_text_has_its_chinese():
    texts = [(where, call.args[0].value) for where, call in calls() if isinstance(call.args[0], ast.Constant)]
    assert len(texts) > 100
    assert [text for text in texts if text[1] not in chinese.texts()] == []


def test_an_error_is_said_with_the_phrases_in_it(choose):
    error = None
    try:
        settings.set("server.port", "x")
    except settings.SettingsError as raised:
        error = raised
    assert str(error) == "server.port cannot be 'x': needed is a whole number from 0 to 65535"
    choose(KT_LANG="zh")
    assert language.say(error.phrase) == "server.port 不能是 'x'：应为0 到 65535 的整数"


def test_every_setting_has_its_chinese():
    assert [name for name, setting in settings.SETTINGS.items() if setting.about not in chinese.texts()] == []


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
    environment = {**os.environ, "KT_LANG": "zh"}
    run = [sys.executable, "-c", SHOW_HELP]
    shown = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    texts = json.loads(shown)
    assert len(texts) > 100
    assert [(where, text) for where, text in texts if text is None or not CHINESE.search(text)] == []
