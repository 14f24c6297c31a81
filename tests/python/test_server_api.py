"""OpenAI's interface through OpenAI's own client, against a real server."""

import json

import pytest

pytest.importorskip("openai")

import openai
from scripted_engine import PIECE, ScriptedEngine
from server_cases import running, user

from kt_kernel.engine.api import RequestError

TOOL_TEMPLATE = "<think> </think> <tool_call>"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "now", "description": "the time", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.fixture(scope="module")
def served():
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture(scope="module")
def with_tools():
    """A model whose template knows tools and reasoning."""
    with running(ScriptedEngine(template=TOOL_TEMPLATE)) as found:
        yield found


@pytest.fixture(scope="module")
def tool_client(with_tools):
    with openai.OpenAI(base_url=f"{with_tools.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def test_chat(client):
    answer = client.chat.completions.create(model="scripted", messages=user("SAY Hello, 你好 𝄞!"))
    assert answer.object == "chat.completion"
    assert answer.model == "scripted"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "Hello, 你好 𝄞!",
        "stop",
    )
    assert choice.logprobs is None
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == -(-len("Hello, 你好 𝄞!") // PIECE)
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream_is_role_text_finish_usage_done(served):
    body = {"messages": user("SAY Hello there"), "stream_options": {"include_usage": True}}
    *chunks, done = served.stream("/v1/chat/completions", body)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    first, *middle, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "Hello there"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in (first, *middle))
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in (first, *middle, last))


def test_usage_only_where_asked_for(served):
    assert all("usage" not in chunk for chunk in served.stream("/v1/chat/completions", {"messages": user("SAY a")}))


def test_streamed_by_the_client(client):
    stream = client.chat.completions.create(model="m", messages=user("SAY one two three"), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "one two three"


def test_several_choices_have_seeds_of_their_own(served, client):
    ask = {"model": "m", "messages": user("words"), "seed": 7, "temperature": 1}
    three = client.chat.completions.create(**ask, n=3)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert {request.sampling.seed for request in served.engine.submitted[-3:]} == {7, 8, 9}
    alone = client.chat.completions.create(**{**ask, "seed": 8})
    assert three.choices[1].message.content == alone.choices[0].message.content
    assert three.choices[0].message.content != three.choices[1].message.content
    assert three.usage.prompt_tokens == alone.usage.prompt_tokens


def test_several_choices_streamed(client):
    whole = client.chat.completions.create(model="m", messages=user("words"), n=2, seed=1)
    texts = ["", ""]
    for chunk in client.chat.completions.create(model="m", messages=user("words"), n=2, seed=1, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_limits_of_tokens(client, field):
    answer = client.chat.completions.create(model="m", messages=user("words"), **{field: 2})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2


def test_max_completion_tokens_goes_before_max_tokens(client):
    answer = client.chat.completions.create(model="m", messages=user("w"), max_tokens=5, max_completion_tokens=2)
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize("stop", ["three", ["nowhere", "three"]])
def test_stop(client, stop):
    answer = client.chat.completions.create(model="m", messages=user("SAY one two three four"), stop=stop)
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"


def test_sampling_reaches_the_engine(served, client):
    client.chat.completions.create(
        model="m",
        messages=user("SAY x"),
        temperature=0.5,
        top_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"12": -100, "13": 5},
        seed=-1,
        extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5, "stop_token_ids": [3], "ignore_eos": True},
    )
    request = served.engine.submitted[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 1, -1)
    assert sampling.logit_bias == {12: -100.0, 13: 5.0}
    assert sampling.seed == 2**63 - 1
    assert request.stop_tokens == (3,)
    assert request.ignore_eos


def test_what_a_request_leaves_out_is_the_models_default(served, client):
    client.chat.completions.create(model="m", messages=user("SAY x"))
    request = served.engine.submitted[-1]
    assert request.sampling == served.engine.defaults
    assert request.max_tokens == served.engine.context_length - len(request.prompt)


def test_chat_logprobs(client):
    ask = {"model": "m", "messages": user("SAY héllo"), "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert "".join(entry.token for entry in whole) == "héllo"
    assert bytes(whole[0].bytes).decode() == whole[0].token
    assert [len(entry.top_logprobs) for entry in whole] == [2, 2]
    streamed = []
    for chunk in client.chat.completions.create(**ask, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == whole


def test_content_parts_roles_and_calls_reach_the_template(with_tools, tool_client):
    called = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    tool_client.chat.completions.create(model="m", messages=messages, tools=TOOLS, extra_body=extra)
    seen, tools, arguments = with_tools.engine.text.calls[-1]
    assert seen[0] == {"role": "system", "content": "Be short."}
    assert seen[1]["content"] == "one\ntwo"
    assert seen[2]["tool_calls"][0]["function"] == {"name": "now", "arguments": {"a": 1}}
    assert seen[2]["content"] == ""
    assert seen[3]["tool_call_id"] == "c1"
    assert tools == TOOLS
    assert arguments == {"enable_thinking": False}


def test_templates_that_take_arguments_of_calls_as_text_only(with_tools, tool_client, monkeypatch):
    text = with_tools.engine.text
    chat = text.chat

    def strict(messages, tools=None, **arguments):
        if any(
            not isinstance(call["function"]["arguments"], str) for m in messages for call in m.get("tool_calls", ())
        ):
            raise RequestError('can only concatenate str (not "dict") to str')
        return chat(messages, tools, **arguments)

    monkeypatch.setattr(text, "chat", strict)
    called = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": "ü"}'}}
    messages = [*user("x"), {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "content": "noon"}]
    tool_client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert text.calls[-1][0][1]["tool_calls"][0]["function"]["arguments"] == '{"a": "ü"}'
    with pytest.raises(openai.BadRequestError, match="the template refuses this"):
        tool_client.chat.completions.create(model="m", messages=[*messages, *user("REFUSE")], tools=TOOLS)


def test_tool_calls(tool_client):
    said = 'SAY Wait.\\n<tool_call>{"name": "now", "arguments": {"zone": "utc"}}</tool_call>'
    ask = {"model": "m", "messages": user(said), "tools": TOOLS}
    choice = tool_client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Wait."
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "now", {"zone": "utc"})
    deltas = [chunk.choices[0] for chunk in tool_client.chat.completions.create(**ask, stream=True)]
    assert deltas[-1].finish_reason == "tool_calls"
    [streamed] = [delta.delta.tool_calls[0] for delta in deltas if delta.delta.tool_calls]
    assert (streamed.index, streamed.function.name) == (0, "now")
    assert streamed.id


def test_tools_that_are_not_to_be_called(with_tools, tool_client):
    said = 'SAY <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    ask = {"model": "m", "messages": user(said), "tools": TOOLS}
    choice = tool_client.chat.completions.create(**ask, tool_choice="none").choices[0]
    assert choice.message.content.startswith("<tool_call>")
    assert choice.finish_reason == "stop"
    assert with_tools.engine.text.calls[-1][1] is None
    twice = user(said + said.removeprefix("SAY "))
    one = tool_client.chat.completions.create(model="m", messages=twice, tools=TOOLS, parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1


def test_reasoning(tool_client):
    message = (
        tool_client.chat.completions.create(model="m", messages=user("SAY <think>Hm.</think>Yes")).choices[0].message
    )
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes")
    opened = {"chat_template_kwargs": {"enable_thinking": True}}
    ask = {"model": "m", "messages": user("SAY Hm.</think>Yes"), "extra_body": opened}
    chunks = list(tool_client.chat.completions.create(**ask, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes"


def test_reasoning_effort_none_switches_thinking_off(with_tools, tool_client):
    tool_client.chat.completions.create(model="m", messages=user("SAY x"), reasoning_effort="none")
    assert with_tools.engine.text.calls[-1][2] == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
    }


def test_completion(client):
    answer = client.completions.create(model="m", prompt="words", max_tokens=3)
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].text) == 3 * PIECE
    assert client.completions.create(model="m", prompt="words").usage.completion_tokens == 16


def test_prompts_of_every_kind(client):
    texts = ["ab", "cd"]
    both = client.completions.create(model="m", prompt=texts, max_tokens=4)
    tokens = client.completions.create(model="m", prompt=[list(text.encode()) for text in texts], max_tokens=4)
    single = [client.completions.create(model="m", prompt=text, max_tokens=4).choices[0].text for text in texts]
    assert [choice.text for choice in both.choices] == [choice.text for choice in tokens.choices] == single
    ids = client.completions.create(model="m", prompt=list(b"ab"), max_tokens=4)
    assert ids.choices[0].text == single[0]
    assert both.usage.prompt_tokens == 4
    many = client.completions.create(model="m", prompt=texts, n=2, max_tokens=4, temperature=0)
    assert [choice.text for choice in many.choices] == [single[0], single[0], single[1], single[1]]
    assert many.usage.prompt_tokens == 4


def test_echo(served, client):
    plain = client.completions.create(model="m", prompt="ab", max_tokens=4).choices[0].text
    assert client.completions.create(model="m", prompt="ab", max_tokens=4, echo=True).choices[0].text == "ab" + plain
    *chunks, _ = served.stream("/v1/completions", {"prompt": [97, 98], "max_tokens": 4, "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab" + plain


def test_completion_logprobs(client):
    found = client.completions.create(model="m", prompt="ab", max_tokens=2, logprobs=1).choices[0]
    assert "".join(found.logprobs.tokens) == found.text
    assert found.logprobs.text_offset == [0, PIECE]
    assert [len(top) for top in found.logprobs.top_logprobs] == [1, 1]


def test_models(client):
    [model] = client.models.list().data
    assert model.id == "scripted"
    assert client.models.retrieve("scripted").id == "scripted"


def test_errors_reach_the_client(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="m", messages=user("x"), temperature=5)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="x")
    with pytest.raises(openai.InternalServerError, match="the script says to fail"):
        client.chat.completions.create(model="m", messages=user("FAIL"))
    with pytest.raises(openai.APIError, match="the script says to fail"):
        list(client.chat.completions.create(model="m", messages=user("FAIL"), stream=True))
