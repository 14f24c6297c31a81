"""Text of tokens and tokens of text: the model's tokenizer and chat template, and text as it is generated."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers.decoders import DecodeStream

from kt_kernel.engine.api import RegionParser, RequestError

_RESERVED = (
    "add_generation_prompt",
    "conversation",
    "padding",
    "return_dict",
    "return_tensors",
    "tokenize",
    "truncation",
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ModelText:
    """The Text of an engine, over a tokenizer of transformers."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.backend = backend if hasattr(backend, "id_to_token") else None
        if self.backend is not None:
            # Else `encode` would change them on the server's thread while the engine's thread reads the tokenizer.
            self.backend.no_truncation()
            self.backend.no_padding()
        tokenizer.model_max_length = 2**63 - 1  # the context is the engine's to watch
        self.template = _chat_template(tokenizer)
        self.declares_answers = getattr(tokenizer, "response_template", None) is not None
        self._byte_level = self.backend is not None and "ByteLevel" in str(self.backend.decoder)
        self._added = {
            token_id: str(token) for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        }

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        **template_arguments: object,
    ) -> list[int]:
        if reserved := [name for name in _RESERVED if name in template_arguments]:
            raise RequestError(f"{', '.join(reserved)} cannot be set for the chat template")
        if self.template is None:
            raise RequestError("the model has no chat template: ask for a completion of a prompt instead")
        try:
            tokens = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **template_arguments,
            )
        except Exception as error:  # templates raise whatever their authors liked, jinja2's errors among them
            raise RequestError(f"the chat template refuses the messages: {error}") from error
        return list(tokens["input_ids"])

    def answer_parser(self, prompt: Sequence[int], tools: Sequence[Mapping[str, object]] | None = None) -> RegionParser:
        prefix = self.decode(prompt)
        return self.tokenizer.get_response_parser(prefix=prefix, tools=None if tools is None else list(tools))

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to a text; half a character where it is that."""
        if token in self._added:
            return self._added[token].encode()
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if isinstance(piece, bytes):
            return piece
        if self._byte_level and all(character in _byte_of_character() for character in piece):
            return bytes(_byte_of_character()[character] for character in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match.group(1), 16)])
        return piece.replace("\u2581", " ").encode()


def _chat_template(tokenizer) -> str | None:
    try:
        return tokenizer.get_chat_template()
    except ValueError:  # none at all, or several without a default
        return None


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes a byte as its Latin-1 character if that is printable, else as one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class TextStream:
    """Text as its tokens come: only whole characters, and what has come never changes."""

    def __init__(self, text: ModelText, skip_special_tokens: bool):
        self._text = text
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens) if text.backend is not None else None
        # Without a tokenizer of `tokenizers`: tokens whose text is out serve as context of those whose text is not.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        if self._stream is not None:
            return self._stream.step(self._text.backend, token) or ""
        self._pending.append(token)
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._text.tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)


class StopStrings:
    """Passes text on up to the first stop string; holds back what may still become one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        if not self._stops:
            return text
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.found, self._held = True, ""
            return text[: min(starts)]
        n_held = max(self._overlap(text, stop) for stop in self._stops)
        cut = len(text) - n_held
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The longest end of text that stop begins with."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0


def end_tokens(*sources: object) -> frozenset[int]:
    """eos_token_id of each source that has one: a number, a list of them, or None."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def open_text(path: Path, trust_remote_code: bool = False) -> ModelText:
    from transformers import AutoTokenizer

    return ModelText(AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code))
