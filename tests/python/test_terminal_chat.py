"""`kt chat` under a pseudo-terminal, against the scripted engine behind the real server."""

import contextlib
import json
import os
import stat

import pytest
from odd_server import delta, odd_server, send, stream
from scripted_engine import ScriptedEngine
from server_cases import running
from terminal import ALT_ENTER, CTRL_C, CTRL_D, UP, Terminal, terminal


@pytest.fixture(scope="module")
def served():
    with running(ScriptedEngine(step_seconds=0.01)) as server:
        yield server


@pytest.fixture
def chat(served, tmp_path):
    with terminal(tmp_path, "chat", "-p", str(served.port)) as started:
        started.wait_for("\n>")
        yield started


def ended(server, reason: str) -> int:
    return server.engine.stats().finished.get(reason, 0)


def kept(tmp_path) -> list[dict]:
    [file] = (tmp_path / ".local/share/kt-kernel/chat_history").iterdir()
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    return json.loads(file.read_text())["messages"]


def ask(chat: Terminal, question: str, answers: int = 1) -> None:
    chat.type(question)
    chat.wait_for("· Out", times=answers)


def test_answers_are_drawn_as_markdown_and_kept(chat, tmp_path):
    ask(chat, "SAY # Title\\n\\n- one **two**\\n\\n```python\\nx = 1\\n```\\n\\nlast")
    shown = [line.strip() for line in chat.lines if line]
    assert shown[shown.index("Title") :][:4] == ["Title", "• one two", "x = 1", "last"]
    assert b"\x1b[1mtwo" in chat.raw
    assert " · TTFT " in chat.text
    assert " · TPOT " in chat.text
    ask(chat, "SAY again", 2)
    assert [message["content"] for message in kept(tmp_path)][-1] == "again"
    chat.type("/quit")
    assert chat.exit_code() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(served, chat, tmp_path):
    before = ended(served, "cancelled")
    chat.type("SLOW SAY " + " ".join(f"word{i}" for i in range(60)))
    chat.wait_for("\nword0 word1")
    chat.type("", CTRL_C)
    chat.wait_for("kt chat: stopped")
    assert served.settle(lambda: ended(served, "cancelled") == before + 1), "the server computes on"
    ask(chat, "SAY still here")
    question, half, *_ = kept(tmp_path)
    assert question["content"].startswith("SLOW")
    assert half["content"].startswith("word0 word1")
    assert "word59" not in half["content"]
    chat.type("", CTRL_D)
    assert chat.exit_code() == 0
    assert "Traceback" not in chat.text


def test_ctrl_c_before_the_first_token_drops_the_question(tmp_path):
    until_the_client_hangs_up = odd_server(lambda handler: handler.rfile.read(1))
    with until_the_client_hangs_up as server, terminal(tmp_path, "chat", "-p", str(server.port)) as chat:
        chat.wait_for("\n>")
        chat.type("hello")
        chat.wait_for("waiting for the first token")
        chat.type("", CTRL_C)
        chat.wait_for("stopped")
        assert "waiting" not in chat.text
        chat.type("/history")
        chat.wait_for("nothing was said yet")
        server.on_post = stream(delta(content="got it", finish="stop"))
        chat.type("/retry")
        chat.wait_for("got it")
        assert [message["content"] for message in server.asked[-1]["messages"]] == ["hello"]


def test_ctrl_c_at_the_prompt(chat):
    chat.type("half a question", CTRL_C)
    chat.wait_for("\n>", times=2)
    assert "once more" not in chat.text
    chat.type("", CTRL_C)
    chat.wait_for("Ctrl-C once more, or Ctrl-D, leaves")
    ask(chat, "SAY no")
    chat.type("", CTRL_C)
    chat.wait_for("once more", times=2)
    chat.type("", CTRL_C)
    assert chat.exit_code() == 0


def test_lines_pasted_and_typed_are_one_question(served, chat):
    chat.paste("first\nsecond")
    chat.type("", ALT_ENTER)
    chat.type("SAY third")
    chat.wait_for("· Out")
    prompt = bytes(served.engine.submitted[-1].prompt).decode()
    assert prompt == "user: first\nsecond\nSAY third\nassistant:"


def test_earlier_questions_come_back(served, tmp_path):
    with terminal(tmp_path, "chat", "-p", str(served.port)) as chat:
        chat.wait_for("\n>")
        ask(chat, "SAY 你好 remembered")
        chat.type("", CTRL_D)
        assert chat.exit_code() == 0
    with terminal(tmp_path, "chat", "-p", str(served.port)) as chat:
        chat.wait_for("\n>")
        chat.type("", UP)
        chat.wait_for("> SAY 你好 remembered")
        ask(chat, "!")
        assert "\n你好 remembered!\n" in chat.text


def test_a_failure_keeps_the_chat_alive(served, chat, tmp_path):
    chat.type("FAIL please")
    chat.wait_for("kt chat: the server failed: ")
    ask(chat, "SAY fine")
    assert [message["content"] for message in kept(tmp_path)] == ["SAY fine", "fine"]
    chat.type("/nonsense")
    chat.wait_for("there is no command /nonsense")


def test_a_long_answer_is_in_the_scrollback_once(chat):
    ask(chat, "SAY ```\\n" + "\\n".join(f"line {i};" for i in range(60)) + "\\n```")
    shown = [line.strip() for line in chat.lines if line.strip().startswith("line ")]
    assert shown == [f"line {i};" for i in range(60)]


def test_reasoning_is_dimmed_and_escapes_are_not_obeyed(tmp_path):
    thoughts = [delta(reasoning_content="let me "), delta(reasoning_content="think")]
    answer = stream(*thoughts, delta(content="so\x1b[2J", finish="stop"))
    with odd_server(answer) as server, terminal(tmp_path, "chat", "-p", str(server.port)) as chat:
        chat.wait_for("\n>")
        ask(chat, "hi")
        assert b"\x1b[2mlet me" in chat.raw
        assert "let me think\n\nso�[2J" in chat.text
        chat.type("/history")
        chat.wait_for("Model: so")


def test_a_server_that_is_gone(tmp_path):
    with contextlib.ExitStack() as stack:
        with odd_server() as server:
            chat = stack.enter_context(terminal(tmp_path, "chat", "-p", str(server.port)))
            chat.wait_for("\n>")
        chat.type("hello?")
        chat.wait_for("nothing listens at")
        chat.type("/q")
        assert chat.exit_code() == 0
    with terminal(tmp_path, "chat", "-p", str(server.port)) as chat:
        assert chat.exit_code() == 1


def test_a_server_without_models(tmp_path):
    none = odd_server(on_get=lambda handler: send(handler, 200, {"data": []}))
    with none as server, terminal(tmp_path, "chat", "-p", str(server.port)) as chat:
        assert chat.exit_code() == 1
        assert "names no model: give one with --model" in chat.text.replace("\n", "")


@pytest.mark.parametrize("changes", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colours(served, tmp_path, changes):
    with terminal(tmp_path, "chat", "-p", str(served.port), **changes) as chat:
        chat.wait_for("\n>")
        ask(chat, "SAY **bold** `x`")
        if changes.get("TERM") == "dumb":
            assert b"**bold** `x`" in chat.raw
        else:
            assert "bold x" in chat.text
        assert b"\x1b[3" not in chat.raw.replace(b"\x1b[3A", b"")
        chat.type("/q")
        assert chat.exit_code() == 0
