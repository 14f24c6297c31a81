"""Answers whose form a tokenizer declares, through transformers' own parser."""

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("transformers")

from engine_cases import tiny_tokenizer
from scripted_engine import ScriptedEngine
from server_cases import running, user
from test_server_answers import cuts
from transformers.utils.chat_parsing import ResponseParser

from kt_kernel.engine.text import ModelText
from kt_kernel.server.answers.declared import Declared
from kt_kernel.server.answers.parts import Call, Content, Reasoning

FORM = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "reasoning_content": {"open": "<why>", "close": "</why>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<do>",
            "close": "</do>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]


def parts_of(pieces: list[str], prefix: str = "assistant:", with_tools: bool = True) -> list:
    parser = Declared(ResponseParser(FORM, prefix=prefix, tools=TOOLS), with_tools)
    found = [part for piece in pieces for part in parser.feed(piece)] + list(parser.end())
    joined = []
    for part in found:
        if isinstance(part, Call):
            joined.append((part.name, part.arguments))
        elif joined and type(joined[-1]) is type(part):
            joined[-1] = type(part)(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<why>\nHm, so.\n</why>\n\nYes, it is.\n", [Reasoning("Hm, so."), Content("Yes, it is.")]),
        ('Look.\n<do>{"name": "now", "arguments": {"a": 1}}</do>', [Content("Look."), ("now", '{"a": 1}')]),
        ('<do>{"name": "now", "arguments": {}}</do>\n' * 2, [("now", "{}"), ("now", "{}")]),
        ("Hm. <do>{broken</do> and <why>more", [Content("Hm. <do>{broken</do> and <why>more")]),
        ("<do>{broken", [Content("<do>{broken")]),
        ("just text", [Content("just text")]),
    ],
)
def test_regions_become_parts(answer, expected):
    for pieces in cuts(answer):
        assert parts_of(pieces) == expected, pieces


def test_the_prompt_may_have_opened_a_region():
    assert parts_of(["Hm.</why>Yes."], prefix="user: x\nassistant:<why>\n") == [Reasoning("Hm."), Content("Yes.")]


def test_without_tools_a_call_is_text():
    assert parts_of(['<do>{"name": "now"}</do>'], with_tools=False) == [Content('{"name": "now"}')]


def test_text_of_the_engine_has_the_tokenizers_own():
    tokenizer = tiny_tokenizer()
    assert not ModelText(tokenizer).declares_answers
    tokenizer.response_template = FORM
    text = ModelText(tokenizer)
    assert text.declares_answers
    parser = Declared(text.answer_parser(text.encode("assistant:<why>"), TOOLS), with_tools=True)
    assert [*parser.feed("Hm.</why>Yes"), *parser.end()] == [Reasoning("Hm."), Content("Yes")]


def test_the_server_prefers_what_the_tokenizer_declares(monkeypatch):
    engine = ScriptedEngine(template="<think> </think>")
    monkeypatch.setattr(engine.text, "declares_answers", True)

    def answer_parser(prompt, tools=None):
        return ResponseParser(FORM, prefix=engine.text.decode(prompt), tools=tools)

    monkeypatch.setattr(engine.text, "answer_parser", answer_parser, raising=False)
    with running(engine) as served:
        said = 'SAY <why>Hm.</why>Now.<do>{"name": "now", "arguments": {}}</do>'
        _, answer = served.post("/v1/chat/completions", {"messages": user(said), "tools": TOOLS, "n": 2})
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["reasoning_content"] == "Hm."
            assert choice["message"]["content"] == "Now."
            assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        assert engine.submitted[-1].special_text
