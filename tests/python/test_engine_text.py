"""Tokens to text and back: half characters, stop strings, templates, bytes."""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: the engine was not tested")

from engine_cases import tiny_tokenizer

from kt_kernel.engine.api import RequestError
from kt_kernel.engine.text import ModelText, StopStrings, TextStream, end_tokens, open_text

SENTENCE = "the cat 猫 says “ça va” \U0001f63a\U0001f468‍\U0001f469‍\U0001f467 on the roof\n\n  the end"


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText(tiny_tokenizer())


class SlowTokenizer:
    """As those without `tokenizers` beneath: decode and little else."""

    def __init__(self, tokenizer):
        self.fast = tokenizer
        self.model_max_length = 1

    def decode(self, tokens, **options):
        return self.fast.decode(tokens, **options)

    def convert_ids_to_tokens(self, token):
        return self.fast.convert_ids_to_tokens(token)

    def get_chat_template(self):
        raise ValueError("none")


@pytest.mark.parametrize("slow", [False, True])
def test_streamed_text_is_the_decoded_text_in_whole_characters(text, slow):
    text = ModelText(SlowTokenizer(text.tokenizer)) if slow else text
    assert (text.backend is None) == slow
    tokens = tiny_tokenizer()(SENTENCE)["input_ids"]
    assert len(tokens) > len(SENTENCE)  # characters of several tokens
    stream = TextStream(text, skip_special_tokens=True)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) == SENTENCE
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces


@pytest.mark.parametrize("slow", [False, True])
def test_half_a_character_is_held_back(text, slow):
    text = ModelText(SlowTokenizer(text.tokenizer)) if slow else text
    cat = tiny_tokenizer()("猫")["input_ids"]
    stream = TextStream(text, skip_special_tokens=True)
    assert [stream.push(token) for token in cat] == ["", "", "猫"]


def test_special_tokens_become_text_only_if_asked(text):
    tokens = text.encode("on<|user|><tool>the</s>")
    for skip, expected in ((True, "on<tool>the"), (False, "on<|user|><tool>the</s>")):
        stream = TextStream(text, skip_special_tokens=skip)
        assert "".join(stream.push(token) for token in tokens) == expected
    assert text.decode(tokens) == "on<|user|><tool>the</s>"


def test_bytes_of_tokens_add_up_to_the_text(text):
    tokens = text.encode(SENTENCE + "<tool></s>")
    assert b"".join(text.token_bytes(token) for token in tokens) == (SENTENCE + "<tool></s>").encode()
    assert text.token_bytes(319) == b""  # of the model's vocabulary, which is larger than the tokenizer's


def test_bytes_of_sentencepiece_tokens():
    pieces = {0: "<0xE7>", 1: "▁the", 2: "猫", 3: b"\xe7\x8c"}
    tokenizer = SimpleNamespace(convert_ids_to_tokens=pieces.get, get_chat_template=SlowTokenizer.get_chat_template)
    tokenizer.get_chat_template = lambda: None
    text = ModelText(tokenizer)
    assert [text.token_bytes(i) for i in range(5)] == [b"\xe7", b" the", "猫".encode(), b"\xe7\x8c", b""]


def test_chat_becomes_a_prompt_that_waits_for_an_answer(text):
    tokens = text.chat([{"role": "user", "content": "on the"}])
    assert text.decode(tokens) == "<|user|>on the<|assistant|>"
    assert text.template.startswith("{% for message in messages %}")


def test_templates_that_refuse_are_request_errors(text):
    with pytest.raises(RequestError, match="the chat template refuses the messages: no aliens"):
        text.chat([{"role": "alien", "content": "hi"}])
    with pytest.raises(RequestError, match="tokenize cannot be set for the chat template"):
        text.chat([{"role": "user", "content": "hi"}], tokenize=False)
    bare = tiny_tokenizer()
    bare.chat_template = None
    assert ModelText(bare).template is None
    with pytest.raises(RequestError, match="the model has no chat template"):
        ModelText(bare).chat([{"role": "user", "content": "hi"}])


def test_encoding_changes_nothing_that_the_other_thread_reads():
    """A tokenizer.json with truncation: without it from the start, the first encode would switch it off."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    text = ModelText(tokenizer)
    assert tokenizer.backend_tokenizer.truncation is None
    assert tokenizer.backend_tokenizer.padding is None
    assert len(text.encode("x" * 5000)) == 5000


def test_one_thread_encodes_while_another_decodes(text):
    """tokenizers refuses what changes a tokenizer that is being read."""
    tokens = text.encode(SENTENCE)
    done, failures = threading.Event(), []

    def encode():
        try:
            while not done.is_set():
                text.chat([{"role": "user", "content": SENTENCE}])
                text.encode(SENTENCE)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=encode)
    thread.start()
    try:
        for _ in range(200):
            stream = TextStream(text, skip_special_tokens=True)
            assert "".join(stream.push(token) for token in tokens) == SENTENCE
    finally:
        done.set()
        thread.join()
    assert failures == []


def pushed(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    finder = StopStrings(stops)
    out = []
    for piece in pieces:
        out.append(finder.push(piece))
        if finder.found:
            return out, True
    return [*out, finder.flush()], False


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "found"),
    [
        ([], ["a", "b"], "ab", False),
        (["END"], ["abc", "E", "N", "D", "x"], "abc", True),
        (["END"], ["abc", "E", "N", "x"], "abcENx", False),
        (["END"], ["aEN"], "aEN", False),
        (["END"], ["EEND"], "E", True),
        (["aab"], ["aa", "ab"], "a", True),
        (["bc", "abcd"], ["ab", "c", "d"], "a", True),  # the one that is complete first
        (["x", "a"], ["bax"], "b", True),  # the one that begins first
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo", True),
        (["日本"], ["今日", "は日", "本"], "今日は", True),
    ],
)
def test_text_ends_before_a_stop_string(stops, pieces, expected, found):
    out, stopped = pushed(stops, pieces)
    assert ("".join(out), stopped) == (expected, found)


def test_what_may_become_a_stop_is_held_back_and_nothing_else():
    assert pushed(["END"], ["abE", "N", "Dx"])[0] == ["ab", "", ""]
    assert pushed(["END"], ["abE", "x", "y"])[0] == ["ab", "Ex", "y", ""]


def test_end_tokens_come_from_lists_and_numbers():
    sources = [SimpleNamespace(eos_token_id=value) for value in (3, [4, 5], None)]
    assert end_tokens(*sources, SimpleNamespace()) == {3, 4, 5}


def test_a_saved_tokenizer_is_opened(tmp_path, text):
    tiny_tokenizer().save_pretrained(tmp_path)
    opened = open_text(tmp_path)
    assert opened.encode(SENTENCE) == text.encode(SENTENCE)
    assert opened.template == text.template
