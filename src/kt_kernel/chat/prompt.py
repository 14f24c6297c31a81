"""The line at which questions are typed: edited, remembered, and pasted with all its lines."""

import sys
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from kt_kernel.chat.session import COMMANDS


def open_prompt(remembered: Path | None) -> PromptSession[str]:
    """`remembered` is the file of earlier questions; None for none."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    names = [name for command in COMMANDS for name in command.names]
    return PromptSession(
        "\n> ",
        history=_history(remembered),
        completer=WordCompleter(names, sentence=True),
        complete_while_typing=False,
        reserve_space_for_menu=4,
        key_bindings=keys,
        enable_open_in_editor=True,
        # Answers may go to a file or pipe; what is typed is seen then too.
        output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
    )


def _history(path: Path | None) -> History:
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            return FileHistory(path)
        except OSError:
            # A chat does not fail because yesterday's questions cannot be kept.
            return InMemoryHistory()
    return InMemoryHistory()
