"""The messages of a chat, and the file they are kept in: {"model", "timestamp", "messages": [{"role", "content"}]}."""

import json
import os
import tempfile
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from kt_kernel.chat.errors import ChatError
from kt_kernel.cli.language import t

_ROLES = ("system", "user", "assistant")


@dataclass
class Conversation:
    """`turns` are questions and answers in turn; what is said to the model beforehand is `system`."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, *self.turns] if self.system else list(self.turns)

    def add(self, role: str, content: str) -> None:
        # Bytes of a terminal that are no UTF-8 come as lone surrogates, which no server takes.
        self.turns.append({"role": role, "content": content.encode(errors="replace").decode()})

    def take_back(self) -> str | None:
        """Removes the last question and its answer; returns the question."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None


def load(path: Path) -> Conversation:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ChatError(t("cannot read {path}: {reason}", path=path, reason=error.strerror)) from None
    except (ValueError, RecursionError):
        raise ChatError(t("{path} is no history of a chat: it is not JSON", path=path)) from None
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ChatError(t("{path} is no history of a chat: it has no list of messages", path=path))
    conversation = Conversation()
    for message in messages:
        if message["role"] == "system":
            conversation.system = message["content"]
        else:
            conversation.turns.append({"role": message["role"], "content": message["content"]})
    return conversation


def save(path: Path, model: str, conversation: Conversation) -> None:
    """Whole or not at all; only its owner may read it."""
    content = {
        "model": model,
        "timestamp": datetime.now().astimezone().isoformat(timespec="seconds"),
        "messages": conversation.messages,
    }
    text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
    temporary = None
    try:
        path = path.resolve()  # a link stays one
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ChatError(t("cannot write {path}: {reason}", path=path, reason=error.strerror)) from None
        raise


def new_file(folder: Path) -> Path:
    """A name that no chat has: the time, and a number where two begin in the same second."""
    name = f"chat_{datetime.now():%Y%m%d_%H%M%S}"
    path, number = folder / f"{name}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}.json"
    return path


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in _ROLES and isinstance(message.get("content"), str)
