"""``kt chat``: talk to a running server."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kt_kernel import env, settings
from kt_kernel.chat import conversation as history
from kt_kernel.chat.conversation import Conversation
from kt_kernel.chat.errors import ChatError
from kt_kernel.cli.language import say, t
from kt_kernel.cli.printing import console, examples, is_terminal, note
from kt_kernel.errors import UserError
from kt_kernel.folders import data_folder

if TYPE_CHECKING:
    from kt_kernel.chat.server import Server
    from kt_kernel.chat.session import Session
    from kt_kernel.chat.view import View

EXAMPLES = examples("kt chat --port 8000", 'echo "Why is the sky blue?" | kt chat')

Host = Annotated[
    str | None,
    typer.Option("--host", "-H", help="Name, address or URL of the server (default: server.host)."),
]
Port = Annotated[int | None, typer.Option("--port", "-p", min=1, max=65535, help="Its port (default: server.port).")]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Which model to ask (default: the first one).")]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", min=0, max=2, help="0 for the likeliest words; more for variety.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")]
System = Annotated[str | None, typer.Option("--system", "-s", help="What the model is told beforehand.")]
SaveHistory = Annotated[
    bool | None,
    typer.Option("--save-history/--no-save-history", help="Keep it in a file (default: on a terminal)."),
]
HistoryFile = Annotated[
    Path | None, typer.Option("--history-file", help="Which file; if it is there, the conversation goes on.")
]
Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Show answers while they are written.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Key for the server (better: KT_KERNEL_API_KEY).")]


def chat(
    host: Host = None,
    port: Port = None,
    model: Model = None,
    temperature: Temperature = 0.7,
    max_tokens: MaxTokens = 2048,
    system: System = None,
    save_history: SaveHistory = None,
    history_file: HistoryFile = None,
    stream: Stream = True,
    api_key: ApiKey = None,
) -> None:
    """Talk to a running server.

    It may be one of 'kt run', or any other that is OpenAI-compatible. On a terminal it is a conversation; /help lists
    its commands. Otherwise all of stdin is one question, and stdout gets the answer alone.
    """
    from kt_kernel.chat.server import Server, base_url
    from kt_kernel.chat.session import HistoryFile as KeptIn
    from kt_kernel.chat.session import Options, Session

    interactive = is_terminal("stdin") and (is_terminal() or is_terminal("stderr"))
    conversation = _conversation(history_file, system)
    question = None if interactive else _question()
    url = base_url(host or settings.get("server.host"), port or settings.get("server.port"))
    server = Server(url, api_key or env.api_key())
    options = Options(_model(server, model), temperature, max_tokens, stream)
    keeps = save_history if save_history is not None else interactive or history_file is not None
    folder = data_folder() / "chat_history" if keeps and history_file is None else None
    kept_in = KeptIn(folder, history_file if keeps else None)
    tell = _tell(interactive)
    session = Session(server, options, conversation, kept_in, _view(), tell)
    if question is not None:
        session.ask(question)
        return
    tell(t("{model} at {url}", model=options.model, url=url))
    tell(t("/help lists the commands, Ctrl-D leaves"))
    _converse(session, data_folder() / "chat_questions" if keeps else None)


def _converse(session: "Session", remembered: Path | None) -> None:
    """Until the user leaves. Ctrl-C stops an answer, or empties the line; twice at an empty line it leaves."""
    from kt_kernel.chat.prompt import open_prompt

    prompt = open_prompt(remembered)
    interrupted = False
    while True:
        try:
            text = prompt.prompt()
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = not prompt.default_buffer.text
            if interrupted:
                note("chat", t("Ctrl-C once more, or Ctrl-D, leaves"))
            continue
        interrupted = False
        try:
            if not session.take(text):
                return
        except KeyboardInterrupt:
            note("chat", t("stopped"))
        except UserError as error:
            note("chat", say(error.phrase))


def _conversation(file: Path | None, system: str | None) -> Conversation:
    conversation = history.load(file) if file is not None and file.exists() else Conversation()
    conversation.system = system or conversation.system
    return conversation


def _question() -> str:
    text = sys.stdin.buffer.read().decode(errors="replace") if sys.stdin is not None else ""
    if not text.strip():
        raise ChatError(t('stdin holds no question: use a terminal, or echo "..." | kt chat'))
    return text.rstrip("\n")


def _model(server: "Server", wanted: str | None) -> str:
    """Asked also where the model is named: a server that is not there shows before the first question."""
    served = server.models()
    if wanted is not None:
        return wanted
    if not served:
        raise ChatError(t("{url} names no model: give one with --model", url=server.url))
    return served[0]


def _view() -> "View":
    from kt_kernel.chat.view import PlainView, TerminalView

    terminal = console()
    if terminal.is_terminal and not terminal.is_dumb_terminal:
        return TerminalView(terminal)
    # An answer with a character that this locale lacks is still an answer.
    sys.stdout.reconfigure(errors="replace")
    return PlainView(sys.stdout, reasoning=terminal.is_terminal)


def _tell(interactive: bool) -> Callable[[str], None]:
    """Lines beside the answers: dimmed on a terminal."""
    from rich.text import Text

    from kt_kernel.chat.markdown import printable

    to = console("stderr")
    style = "dim" if interactive else ""
    return lambda line: to.print(Text(printable(line), style=style), soft_wrap=True)
