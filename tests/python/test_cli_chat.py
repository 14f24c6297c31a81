"""`kt chat` through its entry point, without a terminal: stdin is a question, stdout the answer alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from odd_server import delta, odd_server, send, stream
from terminal import COMMAND, environment

from kt_kernel.chat import conversation as history
from kt_kernel.chat.conversation import Conversation
from kt_kernel.chat.errors import ChatError
from kt_kernel.chat.server import Server, base_url
from kt_kernel.chat.session import COMMANDS, HistoryFile, Options, Session
from kt_kernel.chat.view import PlainView

ANSWER = stream(delta(reasoning_content="hm"), delta(content="你好\n"), delta(content="there"), delta(finish="stop"))


def kt(home: Path, *arguments: str, question: str | bytes | None = "hi", **changes: str) -> subprocess.CompletedProcess:
    given = question.encode() if isinstance(question, str) else question
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "chat", *arguments],
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        env=environment(home, **changes),
        timeout=60,
    )


def test_a_question_in_a_pipe(tmp_path):
    with odd_server(ANSWER) as server:
        odd = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "PYTHONIOENCODING": "ascii"}
        options = ["-p", str(server.port), "-s", "be brief", "-t", "0"]
        said = kt(tmp_path, *options, question=b"two\nlines\n\xff", **odd)
        assert (said.returncode, said.stdout) == (0, b"??\nthere\n"), said.stderr
        asked = server.asked[0]
    assert asked["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "two\nlines\n�"},
    ]
    assert (asked["model"], asked["temperature"], asked["max_tokens"], asked["stream"]) == ("first", 0, 2048, True)
    assert b"Total" in said.stderr
    assert b"\x1b" not in said.stdout + said.stderr
    assert list(tmp_path.rglob("*.json")) == [], "kept without being asked to"


def test_without_a_stream_in_a_file_and_in_chinese(tmp_path):
    file = tmp_path / "deep" / "talk.json"
    whole = {"choices": [{"message": {"content": "b"}, "finish_reason": "length"}]}
    with odd_server(lambda handler: send(handler, 200, whole)) as server:
        host = ["-H", f"http://127.0.0.1:{server.port}", "-m", "second", "--history-file", str(file), "--no-stream"]
        assert kt(tmp_path, *host).stdout == b"b\n"
        said = kt(tmp_path, *host, question="again", KT_LANG="zh")
        assert "总计" in said.stderr.decode()
        assert [message["content"] for message in server.asked[1]["messages"]] == ["hi", "b", "again"]
        assert server.asked[1]["stream"] is False
    kept = json.loads(file.read_text())
    assert (kept["model"], len(kept["messages"])) == ("second", 4)
    assert kept["timestamp"]
    assert os.stat(file).st_mode & 0o077 == 0


@pytest.mark.parametrize("question", [None, "", " \n"])
def test_no_question(tmp_path, question):
    said = kt(tmp_path, "-p", "9", question=question)
    assert (said.returncode, said.stdout) == (1, b"")
    assert said.stderr.decode().startswith("kt chat: stdin holds no question")


def test_no_stdin_at_all(tmp_path):
    command = ["bash", "-c", 'exec "$0" -c "$1" chat <&-', sys.executable, COMMAND]
    said = subprocess.run(command, capture_output=True, env=environment(tmp_path))
    assert said.returncode == 1
    assert b"kt chat: stdin holds no question" in said.stderr


def test_errors_are_one_line_and_exit_code_1(tmp_path):
    with odd_server(stream(delta(content="half"))) as server:
        said = kt(tmp_path, "-p", str(server.port))
        assert (said.returncode, said.stdout) == (1, b"half\n")
        assert len(said.stderr.splitlines()) == 1
        assert b"went away in the middle of the answer" in said.stderr
        port = server.port
    said = kt(tmp_path, "-p", str(port))
    assert (said.returncode, said.stderr.count(b"\n")) == (1, 1)
    assert b"kt chat: nothing listens at" in said.stderr
    assert kt(tmp_path, "-p", "70000").returncode == 2


def test_settings_say_where_the_server_is(tmp_path):
    with odd_server(ANSWER) as server:
        home = tmp_path / "kt"
        home.mkdir()
        (home / "config.yaml").write_text(f"server: {{host: 0.0.0.0, port: {server.port}}}\n")
        assert kt(tmp_path, KT_KERNEL_HOME=str(home)).returncode == 0
        assert kt(tmp_path, KT_KERNEL_HOME=str(home), KT_KERNEL_API_KEY="secret").returncode == 0
        assert server.seen[-1][1]["Authorization"] == "Bearer secret"


def test_an_interrupt_is_130(tmp_path):
    with odd_server(lambda handler: time.sleep(2)) as server:
        command = [sys.executable, "-c", COMMAND, "chat", "-p", str(server.port)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path)
        ) as process:
            process.stdin.write(b"hi")
            process.stdin.close()
            end = time.monotonic() + 20
            while not server.asked and time.monotonic() < end:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
            assert b"Traceback" not in process.stderr.read()


class Chat:
    """A session whose lines and answers are kept."""

    def __init__(self, server, folder: Path | None = None, file: Path | None = None):
        self.said: list[str] = []
        self.conversation = Conversation()
        self.file = HistoryFile(folder, file)
        view = PlainView(open(os.devnull, "w"), reasoning=True)  # noqa: SIM115 (closed with the process)
        options = Options("m", 0.5, 10, stream=True)
        to = Server(base_url("127.0.0.1", server.port), None)
        self.session = Session(to, options, self.conversation, self.file, view, self.said.append)

    def take(self, text: str) -> bool:
        return self.session.take(text)

    @property
    def contents(self) -> list[str]:
        return [message["content"] for message in self.conversation.messages]


def test_commands(tmp_path):
    with odd_server(stream(delta(content="a", finish="stop"))) as server:
        chat = Chat(server, folder=tmp_path)
        assert chat.take("/info")
        assert any(str(tmp_path) in line for line in chat.said)
        assert chat.take("/system be kind")
        assert chat.take("/etc/hosts is what?")
        assert chat.take("  ")
        assert chat.contents == ["be kind", "/etc/hosts is what?", "a"]
        first = chat.file.file
        assert json.loads(first.read_text())["messages"][2] == {"role": "assistant", "content": "a"}
        assert chat.take("/retry")
        assert len(chat.conversation.turns) == 2
        assert chat.take(f"/save {tmp_path}/kept.json")
        assert chat.take("/c")
        assert chat.contents == ["be kind"]
        assert chat.take("new")
        assert chat.file.file not in (None, first)
        assert chat.take(f"/load {tmp_path}/kept.json")
        assert chat.contents == ["be kind", "/etc/hosts is what?", "a"]
        chat.said.clear()
        assert chat.take("/hist")
        assert chat.said == ["System: be kind", "You: /etc/hosts is what?", "Model: a"]
        chat.said.clear()
        assert chat.take("/help")
        assert len(chat.said) == len(COMMANDS) + 1
        assert not any(chat.take(word) for word in ("/q", "/quit", "/exit"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/hlep", "did you mean /help?"),
        ("/xyzzy", "/help lists them"),
        ("/retry", "there is no question"),
        ("/save", "name a file: /save FILE"),
        ("/load", "name a file: /load FILE"),
        ("/load /nowhere/x", "cannot read /nowhere/x: No such file"),
        ("/save /proc/x", "cannot write /proc/x"),
    ],
)
def test_commands_that_fail(text, message):
    with odd_server() as server, pytest.raises(ChatError) as told:
        Chat(server).take(text)
    assert message in str(told.value)


def test_a_failed_answer_takes_its_question_with_it(tmp_path):
    with odd_server(lambda handler: send(handler, 500, {"error": {"message": "full"}})) as server:
        chat = Chat(server, folder=tmp_path)
        with pytest.raises(ChatError, match="500 full"):
            chat.take("why?")
        assert chat.contents == []
        assert list(tmp_path.iterdir()) == []
        server.on_post = stream(delta(content="because", finish="length"))
        assert chat.take("/retry")
        assert chat.contents == ["why?", "because"]
        assert "--max-tokens is 10" in chat.said[-1]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"messages": [{"role": "x", "content": ""}]}', '{"messages": [{"role": "user"}]}']
)
def test_files_that_are_no_histories(tmp_path, content):
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(ChatError, match="is no history of a chat"):
        history.load(file)
    said = kt(tmp_path, "-p", "9", "--history-file", str(file))
    assert said.returncode == 1
    assert file.read_text() == content


def test_a_history_is_whole_or_not_there(tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    history.save(file, "m", Conversation(turns=[{"role": "user", "content": "1"}]))
    before = file.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history.os, "replace", full)
    with pytest.raises(ChatError, match="No space left"):
        history.save(file, "m", Conversation())
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


def test_two_chats_of_one_second_have_two_files(tmp_path):
    first = history.new_file(tmp_path)
    first.touch()
    assert history.new_file(tmp_path) != first
