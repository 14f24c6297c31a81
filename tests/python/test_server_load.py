"""Many at once: the same answers as one after the other, slots that come free, and memory that does not grow."""

import asyncio
import gc
import http.client
import json
import os
import random
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("openai")

import openai
from scripted_engine import ScriptedEngine
from server_cases import running, user

CHAT = "/v1/chat/completions"
SOAK_SECONDS = float(os.environ.get("KT_TEST_SOAK_SECONDS", "6"))


async def streamed(client: openai.AsyncOpenAI, text: str) -> str:
    stream = await client.chat.completions.create(model="m", messages=user(text), stream=True, temperature=0)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_32_streams_at_once_are_those_one_after_the_other():
    prompts = [f"question {i}" for i in range(32)]

    async def ask(url: str) -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            one_by_one = [await streamed(client, prompt) for prompt in prompts]
            return one_by_one, await asyncio.gather(*(streamed(client, prompt) for prompt in prompts))

    with running(ScriptedEngine(slots=8)) as served:
        one_by_one, together = asyncio.run(ask(served.url))
    assert together == one_by_one
    assert len(set(together)) > 20


def open_request(port: int, body: dict) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", CHAT, json.dumps(body))
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_frees_the_slot(stream):
    with running(ScriptedEngine(slots=1, step_seconds=0.05)) as served:
        connection = open_request(served.port, {"messages": user("words"), "stream": stream})
        assert served.settle(lambda: served.engine.stats().running == 1)
        if stream:
            answer = connection.getresponse()
            answer.readline()
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        started = time.monotonic()
        assert served.settle(served.idle)
        # The whole answer would take 20 words at 0.05 s for 3 letters: 2 s at least.
        assert time.monotonic() - started < 1.2
        assert served.engine.stats().finished == {"cancelled": 1}
        assert served.post(CHAT, {"messages": user("SAY x")})[0] == 200
        metrics = served.raw("GET", "/metrics")[2].decode()
        assert 'kt_requests_total{endpoint="/v1/chat/completions",outcome="disconnected"} 1' in metrics


def test_who_goes_away_while_waiting_leaves_the_queue():
    with running(ScriptedEngine(slots=1, step_seconds=0.05)) as served:
        first = open_request(served.port, {"messages": user("words"), "stream": True})
        assert served.settle(lambda: served.engine.stats().running == 1)
        waiting = open_request(served.port, {"messages": user("words"), "n": 3})
        assert served.settle(lambda: served.engine.stats().waiting == 3)
        waiting.close()
        first.close()
        assert served.settle(served.idle)
        assert served.engine.stats().finished == {"cancelled": 4}


def python_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mixed_load(port: int, seed: int, end: float, done: list[int]) -> None:
    chosen = random.Random(seed)
    while time.monotonic() < end:
        stream = chosen.random() < 0.5
        body: object = {"messages": user(f"{chosen.random()} " * chosen.randint(1, 100)), "stream": stream}
        kind = chosen.random()
        if kind < 0.2:
            body = {"messages": "wrong"}
        connection = open_request(port, body)
        if 0.2 < kind < 0.4:
            time.sleep(chosen.random() * 0.02)
            connection.close()
            continue
        answer = connection.getresponse()
        assert answer.status in (200, 400)
        answer.read()
        connection.close()
        done[0] += 1


@pytest.mark.timeout(SOAK_SECONDS + 120)
def test_mixed_load_does_not_grow_memory():
    """KT_TEST_SOAK_SECONDS=600 makes it ten minutes."""
    with running(ScriptedEngine(slots=8, step_seconds=0.0005)) as served:

        def load(seconds: float) -> int:
            done = [0]
            end = time.monotonic() + seconds
            threads = [threading.Thread(target=mixed_load, args=(served.port, i, end, done)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert served.settle(served.idle)
            return done[0]

        load(SOAK_SECONDS / 3)
        blocks, resident = python_blocks(), resident_bytes()
        answered = load(SOAK_SECONDS * 2 / 3)
        more_blocks, more_resident = python_blocks() - blocks, resident_bytes() - resident
        assert answered > 50
        # One object kept for each request would show.
        assert more_blocks < 500 + answered / 2, f"{more_blocks} blocks more after {answered} requests"
        # The arenas of some 30 threads take up to 25 MB until they are filled, within the first minute.
        assert more_resident < 32_000_000 + 256 * answered, f"{more_resident} bytes more after {answered} requests"
        assert served.settle(lambda: not served.server.server_state.tasks)
