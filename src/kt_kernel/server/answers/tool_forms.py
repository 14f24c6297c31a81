"""How models write calls of tools: one reader for each form, from the text between its marks to calls.

A reader raises ValueError (or SyntaxError, from Python's parser) where the text is not of its form; it is then shown as
text, so that nothing that a model said gets lost.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kt_kernel.server.answers.parts import Call, Schemas, new_id

# Marks of DeepSeek stand between wide bars, with a low block for each space.
_BAR, _SPACE = "\uff5c", "\u2581"
_DSML = f"{_BAR}DSML{_BAR}"

Reader = Callable[[str, Schemas], list[Call]]


def _deepseek(words: str) -> str:
    return f"<{_BAR}{words.replace(' ', _SPACE)}{_BAR}>"


@dataclass(frozen=True)
class ToolForm:
    name: str
    probe: tuple[str, ...]  # all of these are in the chat templates of models that use the form
    begin: tuple[str, ...]  # marks before calls; for ``whole`` forms what a whole answer begins with
    end: str | None  # the mark behind them; None: the end of the answer
    read: Reader
    special: bool = False  # the marks are special tokens
    whole: bool = False  # a call has no marks but is all of the answer


def _call(name: object, arguments: object, form: str = "call_") -> Call:
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call without a name")
    if isinstance(arguments, str):
        arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are not an object")
    return Call(name.strip(), json.dumps(arguments, ensure_ascii=False), new_id(form))


def _from_object(found: object, form: str = "call_") -> Call:
    if not isinstance(found, dict):
        raise ValueError("not an object")
    if isinstance(found.get("function"), dict):
        found = found["function"]
    return _call(found.get("name"), found.get("arguments", found.get("parameters")), form)


def _typed(text: str, schema: object) -> object:
    """A value of a form that writes arguments as text; what the tool's schema calls a string stays one."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _argument_types(schemas: Schemas, name: str) -> Mapping[str, object]:
    properties = schemas.get(name, {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def read_hermes(text: str, schemas: Schemas) -> list[Call]:
    """{"name": ..., "arguments": {...}}"""
    found = json.loads(text, strict=False)
    return [_from_object(one) for one in (found if isinstance(found, list) else [found])]


def read_qwen_xml(text: str, schemas: Schemas) -> list[Call]:
    """<function=NAME> <parameter=KEY> VALUE </parameter> </function>; some of these models write JSON at times."""
    if text.lstrip().startswith("{"):
        return read_hermes(text, schemas)
    calls = []
    for name, body in re.findall(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", text, re.DOTALL):
        types = _argument_types(schemas, name.strip())
        pairs = re.findall(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", body, re.DOTALL)
        arguments = {key.strip(): _typed(_unframed(value), types.get(key.strip())) for key, value in pairs}
        calls.append(_call(name, arguments))
    return _some(calls)


def read_glm(text: str, schemas: Schemas) -> list[Call]:
    """NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ..."""
    name = text.split("<arg_key>", 1)[0].strip()
    if not re.fullmatch(r"[\w.\-]+", name):
        raise ValueError("not the name of a function")
    types = _argument_types(schemas, name)
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", text, re.DOTALL)
    return [_call(name, {key.strip(): _typed(value, types.get(key.strip())) for key, value in pairs})]


def read_invoke(text: str, schemas: Schemas, mark: str = "") -> list[Call]:
    """<invoke name="NAME"> <parameter name="KEY"> VALUE </parameter> </invoke>"""
    calls = []
    invoke = rf'<{mark}invoke name="?([^">]+)"?>(.*?)</{mark}invoke>'
    parameter = rf'<{mark}parameter name="?([^">]+)"?([^>]*)>(.*?)</{mark}parameter>'
    for name, body in re.findall(invoke, text, re.DOTALL):
        types = _argument_types(schemas, name)
        arguments = {}
        for key, attributes, value in re.findall(parameter, body, re.DOTALL):
            kind = {"type": "string"} if 'string="true"' in attributes else types.get(key)
            arguments[key] = _typed(_unframed(value) if not attributes else value, kind)
        calls.append(_call(name, arguments))
    return _some(calls)


def read_dsml(text: str, schemas: Schemas) -> list[Call]:
    """As read_invoke, with a mark in every tag: DeepSeek V3.2."""
    return read_invoke(text, schemas, _DSML)


def read_deepseek(text: str, schemas: Schemas) -> list[Call]:
    """V3: function SEP NAME, then JSON in a code block. V3.1: NAME SEP JSON."""
    calls = []
    for one in text.split(_deepseek("tool call begin"))[1:]:
        head, separator, rest = one.split(_deepseek("tool call end"), 1)[0].partition(_deepseek("tool sep"))
        if not separator:
            raise ValueError("a call without a separator")
        fenced = re.match(r"\s*([^\n]+)\n```(?:json)?\n(.*?)\n?```", rest, re.DOTALL)
        calls.append(_call(fenced[1], fenced[2]) if fenced else _call(head, rest))
    return _some(calls)


def read_kimi(text: str, schemas: Schemas) -> list[Call]:
    """functions.NAME:INDEX ARGUMENT_BEGIN JSON. The id is part of the form: the template wants it back."""
    calls = []
    for one in text.split("<|tool_call_begin|>")[1:]:
        head, mark, arguments = one.split("<|tool_call_end|>", 1)[0].partition("<|tool_call_argument_begin|>")
        named = re.fullmatch(r"\s*(?:functions\.)?([\w.\-]+?)(?::\d+)?\s*", head)
        if not mark or not named:
            raise ValueError("a call without a name")
        call = _call(named[1], arguments)
        calls.append(Call(call.name, call.arguments, head.strip()))
    return _some(calls)


def read_mistral(text: str, schemas: Schemas) -> list[Call]:
    """A JSON list of {"name", "arguments"}; or NAME [CALL_ID]ID [ARGS] JSON, any number of times."""
    if text.lstrip().startswith("["):
        found = json.loads(text, strict=False)
        return _some([_from_object(one, "short") for one in found])
    calls = []
    for one in text.split("[TOOL_CALLS]"):
        head, mark, arguments = one.partition("[ARGS]")
        if not mark:
            head, brace, rest = one.partition("{")
            arguments = brace + rest
        calls.append(_call(head.split("[CALL_ID]", 1)[0], arguments, "short"))
    return _some(calls)


def read_llama(text: str, schemas: Schemas) -> list[Call]:
    """{"name": ..., "parameters": {...}}, several separated by semicolons, and nothing else."""
    decoder = json.JSONDecoder(strict=False)
    text = text.strip().removeprefix("<|python_tag|>").strip()
    calls = []
    while text:
        found, end = decoder.raw_decode(text)
        calls.append(_from_object(found))
        text = text[end:].lstrip("; \n\t")
    return _known(_some(calls), schemas)


def read_pythonic(text: str, schemas: Schemas) -> list[Call]:
    """[NAME(key=value, ...), ...], as Python would write it."""
    text = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>")
    return _known(_pythonic_calls(text), schemas)


def _pythonic_calls(text: str) -> list[Call]:
    tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("not a list of calls")
    calls = []
    for one in tree.elts:
        if not isinstance(one, ast.Call) or one.args:
            raise ValueError("not a call with named arguments")
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in one.keywords}
        calls.append(_call(ast.unparse(one.func), arguments))
    return _some(calls)


def read_marked_pythonic(text: str, schemas: Schemas) -> list[Call]:
    """The same between marks, where any name counts: LFM2."""
    return _pythonic_calls(text)


def read_gemma(text: str, schemas: Schemas) -> list[Call]:
    """call:NAME{key:<|"|>text<|"|>,key:2}: JSON but for its quotes, and keys without any."""
    found = re.fullmatch(r"\s*call:([\w.\-]+)(\{.*\})\s*", text, re.DOTALL)
    if not found:
        raise ValueError("not a call")
    parts = found[2].split('<|"|>')
    parts[0::2] = [re.sub(r"([{,]\s*)([A-Za-z_][\w.\-]*)\s*:", r'\1"\2":', part) for part in parts[0::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return [_call(found[1], "".join(parts))]


def _unframed(value: str) -> str:
    """Without the one line break before and behind it that the forms with tags have."""
    return value.removeprefix("\n").removesuffix("\n")


def _some(calls: list[Call]) -> list[Call]:
    if not calls:
        raise ValueError("no calls")
    return calls


def _known(calls: list[Call], schemas: Schemas) -> list[Call]:
    """Forms without marks look like other JSON: only tools that were offered count."""
    if any(call.name not in schemas for call in calls):
        raise ValueError("not a tool that was offered")
    return calls


# The first whose probe fits is used: those that say more come first.
TOOL_FORMS = (
    ToolForm("dsml", (_DSML,), (f"<{_DSML}function_calls>",), f"</{_DSML}function_calls>", read_dsml, special=True),
    ToolForm(
        "deepseek",
        (_deepseek("tool calls begin"),),
        (_deepseek("tool calls begin"),),
        _deepseek("tool calls end"),
        read_deepseek,
        special=True,
    ),
    ToolForm(
        "kimi",
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_end|>",
        read_kimi,
        special=True,
    ),
    ToolForm("minimax", ("<minimax:tool_call>",), ("<minimax:tool_call>",), "</minimax:tool_call>", read_invoke),
    ToolForm("gemma", ("<|tool_call>",), ("<|tool_call>",), "<tool_call|>", read_gemma, special=True),
    ToolForm(
        "lfm2",
        ("<|tool_call_start|>",),
        ("<|tool_call_start|>",),
        "<|tool_call_end|>",
        read_marked_pythonic,
        special=True,
    ),
    ToolForm("nemotron", ("<TOOLCALL>",), ("<TOOLCALL>",), "</TOOLCALL>", read_hermes),
    ToolForm("granite", ("<|tool_call|>",), ("<|tool_call|>",), None, read_hermes, special=True),
    ToolForm("seed", ("<seed:tool_call>",), ("<seed:tool_call>",), "</seed:tool_call>", read_qwen_xml),
    ToolForm("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), None, read_mistral, special=True),
    ToolForm("glm", ("<tool_call>", "<arg_key>"), ("<tool_call>",), "</tool_call>", read_glm),
    ToolForm("qwen_xml", ("<tool_call>", "<function="), ("<tool_call>",), "</tool_call>", read_qwen_xml),
    ToolForm("hermes", ("<tool_call>",), ("<tool_call>",), "</tool_call>", read_hermes),
    ToolForm("pythonic", ("<|python_start|>",), ("<|python_start|>", "["), None, read_pythonic, True, True),
    ToolForm("pythonic", ("[func_name1(",), ("[",), None, read_pythonic, whole=True),
    ToolForm("llama", ("<|python_tag|>",), ("<|python_tag|>", "{"), None, read_llama, True, True),
    ToolForm("llama", ('"parameters"', "tool"), ("{",), None, read_llama, whole=True),
)
