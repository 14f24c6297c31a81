"""The chat: questions and commands in, answers out."""

import difflib
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kt_kernel.chat import conversation as history
from kt_kernel.chat.answer import Answer
from kt_kernel.chat.conversation import Conversation
from kt_kernel.chat.errors import ChatError
from kt_kernel.chat.server import Server
from kt_kernel.chat.view import View
from kt_kernel.cli.language import t


@dataclass(frozen=True)
class Options:
    model: str
    temperature: float
    max_tokens: int
    stream: bool


@dataclass
class HistoryFile:
    """Where a conversation is kept: a file, or a folder that gets a file for each; without both it is not kept."""

    folder: Path | None = None
    file: Path | None = None

    def save(self, model: str, conversation: Conversation) -> None:
        if self.file is None and self.folder is not None:
            self.file = history.new_file(self.folder)
        if self.file is not None:
            history.save(self.file, model, conversation)

    def begin_anew(self) -> None:
        if self.folder is not None:
            self.file = None


class Session:
    """`tell` prints a line that is no part of an answer."""

    def __init__(
        self,
        server: Server,
        options: Options,
        conversation: Conversation,
        file: HistoryFile,
        view: View,
        tell: Callable[[str], None],
    ):
        self._server = server
        self._options = options
        self._conversation = conversation
        self._file = file
        self._view = view
        self._tell = tell
        self._dropped: str | None = None  # the question whose answer failed, for /retry

    def take(self, text: str) -> bool:
        """A question or a command; False when the user wants to leave. ChatError where an answer or command fails."""
        if not text.strip():
            return True
        word = text.split(maxsplit=1)[0]
        # A path, /etc/hosts, begins a question.
        if not re.fullmatch(r"/\w*", word):
            self.ask(text.rstrip())  # a paste often ends in a line's end
            return True
        command = next((command for command in COMMANDS if word in command.names), None)
        if command is None:
            close = difflib.get_close_matches(word, [name for row in COMMANDS for name in row.names], 1, 0.7)
            hint = t("did you mean {name}?", name=close[0]) if close else t("/help lists them")
            raise ChatError(t("there is no command {name}; {hint}", name=word, hint=hint))
        return command.run(self, text[len(word) :].strip()) is not LEAVE

    def ask(self, question: str) -> None:
        """Asks, shows the answer, keeps both. A question without an answer is not kept."""
        self._conversation.add("user", question)
        answer = Answer()
        interrupted = False
        try:
            self._receive(answer)
        except KeyboardInterrupt:
            interrupted = True
        except BaseException:
            self._dropped = self._conversation.take_back()
            raise
        answer.end()
        if interrupted and not answer.content:
            self._dropped = self._conversation.take_back()
            raise KeyboardInterrupt
        self._conversation.add("assistant", answer.content)
        self._dropped = None
        self._file.save(self._options.model, self._conversation)
        if interrupted:
            raise KeyboardInterrupt
        self._tell(answer.timings(self._options.stream))
        if answer.finish == "length":
            self._tell(t("the answer was cut off; --max-tokens is {count}", count=self._options.max_tokens))

    def _receive(self, answer: Answer) -> None:
        options = self._options
        question = {
            "model": options.model,
            "messages": self._conversation.messages,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            "stream": options.stream,
        }
        if options.stream:
            question["stream_options"] = {"include_usage": True}
        with self._view, closing(self._server.answer(question)) as pieces:
            for piece in pieces:
                answer.take(piece)
                self._view.show(piece)

    def leave(self, _: str) -> object:
        return LEAVE

    def help(self, _: str) -> None:
        for command in COMMANDS:
            names = " ".join(command.names) + (f" {command.argument}" if command.argument else "")
            self._tell(f"  {names:<22}{command.text()}")
        self._tell("  " + t("Alt-Enter begins a new line; Ctrl-C stops an answer; Ctrl-D leaves"))

    def clear(self, _: str) -> None:
        self._conversation.turns.clear()
        self._dropped = None
        self._file.begin_anew()
        self._tell(t("a new conversation"))

    def show_history(self, _: str) -> None:
        names = {"system": t("System"), "user": t("You"), "assistant": t("Model")}
        if not self._conversation.messages:
            self._tell(t("nothing was said yet"))
        for message in self._conversation.messages:
            self._tell(f"{names[message['role']]}: {message['content']}")

    def show_info(self, _: str) -> None:
        options = self._options
        facts = {
            t("server"): self._server.url,
            t("model"): options.model,
            t("temperature"): f"{options.temperature:g}",
            t("longest answer"): t("{count} tokens", count=options.max_tokens),
            t("messages"): str(len(self._conversation.messages)),
            t("kept in"): str(self._file.file or self._file.folder or t("no file")),
        }
        for name, value in facts.items():
            self._tell(f"  {name}: {value}")

    def retry(self, _: str) -> None:
        question = self._dropped or self._conversation.take_back()
        if question is None:
            raise ChatError(t("there is no question to ask again"))
        self.ask(question)

    def set_system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        self._tell(t("System: {prompt}", prompt=self._conversation.system or t("nothing")))

    def save(self, name: str) -> None:
        if not name:
            raise ChatError(t("name a file: {command}", command="/save FILE"))
        path = Path(name).expanduser()
        history.save(path, self._options.model, self._conversation)
        self._tell(t("saved to {path}", path=path))

    def load(self, name: str) -> None:
        if not name:
            raise ChatError(t("name a file: {command}", command="/load FILE"))
        loaded = history.load(Path(name).expanduser())
        self._conversation.system, self._conversation.turns = loaded.system, loaded.turns
        self._dropped = None
        self._file.begin_anew()
        self._tell(t("{count} messages from {path}", count=len(loaded.messages), path=name))


LEAVE = object()


@dataclass(frozen=True)
class Command:
    names: tuple[str, ...]
    run: Callable[[Session, str], object]
    text: Callable[[], str]  # in the language of the moment
    argument: str = ""


COMMANDS = (
    Command(("/help", "/h"), Session.help, lambda: t("list the commands")),
    Command(("/quit", "/exit", "/q"), Session.leave, lambda: t("leave")),
    Command(("/clear", "/c"), Session.clear, lambda: t("forget what was said")),
    Command(("/history", "/hist"), Session.show_history, lambda: t("show what was said")),
    Command(("/info", "/i"), Session.show_info, lambda: t("server, model and settings")),
    Command(("/retry", "/r"), Session.retry, lambda: t("ask the last question again")),
    Command(("/system",), Session.set_system, lambda: t("what the model is told beforehand"), "TEXT"),
    Command(("/save",), Session.save, lambda: t("write the conversation to a file"), "FILE"),
    Command(("/load",), Session.load, lambda: t("go on with the conversation of a file"), "FILE"),
)
