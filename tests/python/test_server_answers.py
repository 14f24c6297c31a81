"""Answers taken apart: every form, cut at every place into pieces, gives the same parts."""

import json

import pytest

pytest.importorskip("msgspec")

from kt_kernel.server.answers.parts import Call, Content, Reasoning
from kt_kernel.server.answers.style import style_of
from kt_kernel.server.answers.tool_forms import TOOL_FORMS

BAR, LOW = "\uff5c", "\u2581"
WEATHER = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
CALL = ("weather", {"city": "Köln", "days": 2})


def deepseek(words: str) -> str:
    return f"<{BAR}{words.replace(' ', LOW)}{BAR}>"


# form -> what is in its templates, and an answer that calls weather("Köln", 2), behind some text where there is room
ANSWERS = {
    "hermes": (
        "<tool_call>",
        'Look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>',
    ),
    "qwen_xml": (
        "<tool_call> <function=",
        "Look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "glm": (
        "<tool_call> <arg_key>",
        "Look.<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
    ),
    "minimax": (
        "<minimax:tool_call>",
        'Look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "dsml": (
        f"{BAR}DSML{BAR}",
        f'Look.\n\n<{BAR}DSML{BAR}function_calls>\n<{BAR}DSML{BAR}invoke name="weather">\n'
        f'<{BAR}DSML{BAR}parameter name="city" string="true">Köln</{BAR}DSML{BAR}parameter>\n'
        f'<{BAR}DSML{BAR}parameter name="days" string="false">2</{BAR}DSML{BAR}parameter>\n'
        f"</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}function_calls>",
    ),
    "deepseek": (
        deepseek("tool calls begin"),
        f"Look.{deepseek('tool calls begin')}{deepseek('tool call begin')}weather{deepseek('tool sep')}"
        f'{{"city": "Köln", "days": 2}}{deepseek("tool call end")}{deepseek("tool calls end")}',
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        "Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Köln", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "gemma": ("<|tool_call>", 'Look.<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>'),
    "lfm2": ("<|tool_call_start|>", "Look.<|tool_call_start|>[weather(city='Köln', days=2)]<|tool_call_end|>"),
    "nemotron": (
        "<TOOLCALL>",
        'Look.<TOOLCALL>[{"name": "weather", "arguments": {"city": "Köln", "days": 2}}]</TOOLCALL>',
    ),
    "granite": ("<|tool_call|>", 'Look.<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln", "days": 2}}]'),
    "seed": (
        "<seed:tool_call>",
        "Look.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Köln</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>",
    ),
    "mistral": ("[TOOL_CALLS]", 'Look.[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 2}'),
    "llama": ("<|python_tag|>", '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}'),
    "pythonic": ("[func_name1(", "[weather(city='Köln', days=2)]"),
}


def parts_of(template: str, pieces: list[str], *, tools=WEATHER, prompt_end: str = "") -> list:
    """Neighbours of a kind joined, ids left out."""
    parser = style_of(template).parser(prompt_end, tools)
    found = [part for piece in pieces for part in parser.feed(piece)] + list(parser.end())
    joined = []
    for part in found:
        if isinstance(part, Call):
            joined.append(("call", part.name, json.loads(part.arguments)))
        elif joined and joined[-1][0] == type(part).__name__:
            joined[-1] = (joined[-1][0], joined[-1][1] + part.text)
        else:
            joined.append((type(part).__name__, part.text))
    return joined


def cuts(text: str) -> list[list[str]]:
    """Whole, in two at every place, and letter by letter."""
    return [[text], *([text[:i], text[i:]] for i in range(1, len(text))), list(text)]


def test_every_form_has_a_case():
    assert {form.name for form in TOOL_FORMS} == ANSWERS.keys()


@pytest.mark.parametrize("form", ANSWERS)
def test_calls_are_found_however_the_text_is_cut(form):
    template, answer = ANSWERS[form]
    text = [("Content", "Look.")] if answer.startswith("Look.") else []
    for pieces in cuts(answer):
        assert parts_of(template, pieces) == [*text, ("call", *CALL)], pieces


@pytest.mark.parametrize("form", ANSWERS)
def test_without_tools_the_text_stays_as_it_is(form):
    template, answer = ANSWERS[form]
    assert parts_of(template, list(answer), tools={}) == [("Content", answer)]


@pytest.mark.parametrize("form", [form for form in ANSWERS if form not in ("llama", "pythonic")])
def test_a_call_that_is_none_is_shown_as_text(form):
    template, answer = ANSWERS[form]
    broken = answer.replace("weather", "").replace("functions.", "")
    shown = "".join(text for kind, text in parts_of(template, list(broken)) if kind == "Content")
    assert shown.replace("\n", "") == broken.replace("\n", "")


@pytest.mark.parametrize("form", ["hermes", "qwen_xml", "glm", "deepseek", "kimi", "mistral", "llama", "pythonic"])
def test_two_calls(form):
    template, answer = ANSWERS[form]
    begin = next(row for row in TOOL_FORMS if row.name == form).begin[0]
    twice = {
        "deepseek": answer.replace(deepseek("tool calls end"), "") + answer.partition(begin)[2],
        "kimi": answer.replace("<|tool_calls_section_end|>", "") + answer.partition(begin)[2].replace(":0", ":1"),
        "llama": f"{answer}; {answer}",
        "pythonic": f"[{answer[1:-1]}, {answer[1:-1]}]",
    }.get(form, answer + "\n" + answer.removeprefix("Look."))
    calls = [part for part in parts_of(template, list(twice)) if part[0] == "call"]
    assert calls == [("call", *CALL)] * 2


def test_forms_of_their_own():
    assert parts_of("[TOOL_CALLS]", ['[TOOL_CALLS][{"name": "now", "arguments": {}}]']) == [("call", "now", {})]
    fenced = (
        f"{deepseek('tool calls begin')}{deepseek('tool call begin')}function{deepseek('tool sep')}now\n"
        f"```json\n{{}}\n```{deepseek('tool call end')}{deepseek('tool calls end')}"
    )
    assert parts_of(deepseek("tool calls begin"), [fenced]) == [("call", "now", {})]
    assert parts_of("<tool_call> <arg_key>", ["<tool_call>now\n</tool_call>"]) == [("call", "now", {})]
    # Cut off by the end of the answer, but complete.
    assert parts_of("<tool_call>", ['<tool_call>{"name": "now", "arguments": {}}']) == [("call", "now", {})]


def test_values_of_gemma():
    answer = '<|tool_call>call:now{a:{b:[<|"|>x:{y,z}<|"|>,true,1.5],c_d:null}}<tool_call|>'
    assert parts_of("<|tool_call>", list(answer)) == [
        ("call", "now", {"a": {"b": ["x:{y,z}", True, 1.5], "c_d": None}})
    ]
    template = "<|channel>thought\n<channel|>"
    answer = "<|channel>thought\nHm.<channel|>Yes."
    for pieces in cuts(answer):
        assert parts_of(template, pieces) == [("Reasoning", "Hm."), ("Content", "Yes.")]


def test_ids_that_templates_want_back():
    kimi = style_of("<|tool_calls_section_begin|>").parser("", WEATHER)
    [_, call] = kimi.feed(ANSWERS["kimi"][1])
    assert call.id == "functions.weather:0"
    mistral = style_of("[TOOL_CALLS]").parser("", WEATHER)
    mistral.feed(ANSWERS["mistral"][1])
    [call] = mistral.end()
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_json_that_is_no_call_of_a_tool_stays_text():
    answer = '{"name": "somebody", "parameters": {}}'
    assert parts_of("<|python_tag|>", list(answer)) == [("Content", answer)]
    assert parts_of("[func_name1(", list("[1, 2, 3]")) == [("Content", "[1, 2, 3]")]
    deep = "[" * 50_000
    assert parts_of("[func_name1(", [deep]) == [("Content", deep)]


def test_arguments_follow_the_schema():
    arguments = "".join(f"<arg_key>{key}</arg_key><arg_value>12</arg_value>" for key in ("city", "days"))
    answer = f"<tool_call>weather{arguments}</tool_call>"
    assert parts_of("<tool_call> <arg_key>", [answer]) == [("call", "weather", {"city": "12", "days": 12})]


THINK = "{{ '<think>' }} <tool_call>"


@pytest.mark.parametrize(
    ("prompt_end", "answer", "expected"),
    [
        ("", "<think>\nHm, 2 < 3.\n</think>\n\nYes.", [("Reasoning", "Hm, 2 < 3."), ("Content", "Yes.")]),
        ("assistant\n<think>\n", "Hm.</think>Yes.", [("Reasoning", "Hm."), ("Content", "Yes.")]),
        ("assistant\n<think>\n\n</think>\n\n", "Yes.", [("Content", "Yes.")]),
        ("", "Yes, <think> is a tag.", [("Content", "Yes, <think> is a tag.")]),
        ("", "<thin", [("Content", "<thin")]),
        ("", "  \n", [("Content", "  \n")]),
        ("<think>", "never ends ", [("Reasoning", "never ends")]),
        ("", "<think></think>a <b", [("Content", "a <b")]),
        ("", "<think>x</think> ", [("Reasoning", "x")]),
        (
            "<think>",
            'Hm.\n</think>\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n',
            [("Reasoning", "Hm."), ("call", "now", {})],
        ),
    ],
)
def test_reasoning_however_it_is_cut(prompt_end, answer, expected):
    for pieces in cuts(answer):
        assert parts_of(THINK, pieces, prompt_end=prompt_end) == expected, pieces


HARMONY = "<|channel|> <|message|> developer"
HARMONY_ANSWERS = [
    (
        "<|channel|>analysis<|message|>Hm < 3.<|end|><|start|>assistant<|channel|>final<|message|>Yes <b>.<|return|>",
        [("Reasoning", "Hm < 3."), ("Content", "Yes <b>.")],
    ),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Köln", "days": 2}<|call|>',
        [("Reasoning", "Hm."), ("call", *CALL)],
    ),
    (
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
        [("call", "now", {})],
    ),
    ("<|channel|>commentary<|message|>First I look.<|end|>", [("Content", "First I look.")]),
    ("Plain.", [("Content", "Plain.")]),
    ("<|channel|>commentary to=functions.now<|message|>not json<|call|>", [("Content", "not json")]),
]


@pytest.mark.parametrize(("answer", "expected"), HARMONY_ANSWERS)
def test_harmony_however_it_is_cut(answer, expected):
    for pieces in cuts(answer):
        assert parts_of(HARMONY, pieces) == expected, pieces


def test_styles():
    assert style_of(None).parser("", WEATHER).feed("<think>") == [Content("<think>")]
    assert not style_of("<tool_call>").special_text(with_tools=True)
    assert style_of("[TOOL_CALLS]").special_text(with_tools=True)
    assert not style_of("[TOOL_CALLS]").special_text(with_tools=False)
    assert style_of(HARMONY).special_text(with_tools=False)
    assert style_of(HARMONY).knows_developer
    parser = style_of("[THINK] [TOOL_CALLS]").parser("", {})
    assert [*parser.feed("[THINK]a[/THINK]b"), *parser.end()] == [Reasoning("a"), Content("b")]
