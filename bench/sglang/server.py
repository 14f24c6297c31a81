"""SGLang's server over HTTP: requests at once, a client that hangs up, and what is left when the server ends."""

import http.client
import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import checks
from engines import EngineError, Place, Process

_SHARED_MEMORY = "/dev/shm"
# Its scheduler tells its load by these, and does not remove them when it is killed; with or without kt_kernel.
_OF_SGLANG = "/dev/shm/sglang_loads_"
_LONG = 3000  # tokens of the request whose client hangs up


def command_line(options: dict) -> list[str]:
    """{"kt_method": "BF16", "trust": True} -> --kt-method BF16 --trust"""
    words = []
    for name, value in options.items():
        if value is False or value is None:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server(Process):
    def __init__(self, place: Place, options: dict, log: Path, **variables: str):
        self.port = free_port()
        words = command_line({**options, "host": "127.0.0.1", "port": self.port})
        super().__init__(place, ["-m", "sglang.launch_server", *words], log, variables)

    def wait_until_up(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.popen.poll() is not None:
                raise EngineError(f"the server has ended: {self.last_words()} ({self.log})")
            with suppress(OSError, http.client.HTTPException):
                if self._ask("GET", "/health")[0] == 200:
                    return
            time.sleep(0.5)
        raise EngineError(f"the server was not up within {seconds:.0f} s: {self.last_words()} ({self.log})")

    def generate(self, row: dict) -> dict:
        body = {"input_ids": row["prompt_ids"], "sampling_params": _greedy(len(row["output_ids"]))}
        return {"ids": self._json("POST", "/generate", body)["output_ids"]}

    def chat(self, text: str) -> str:
        body = {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        return self._json("POST", "/v1/chat/completions", body)["choices"][0]["message"]["content"]

    def models(self) -> list[dict]:
        return self._json("GET", "/v1/models")["data"]

    def hang_up(self, row: dict) -> None:
        """Begins a long answer, reads the first of it, and closes the connection."""
        body = {"input_ids": row["prompt_ids"], "sampling_params": _greedy(_LONG), "stream": True}
        with self._connection() as connection:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            connection.getresponse().readline()

    @contextmanager
    def busy(self):
        """A long request is under way."""
        body = {"input_ids": [1, 2, 3], "sampling_params": _greedy(_LONG)}
        with self._connection() as connection:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            while not self.running():
                time.sleep(0.05)
            yield

    def running(self) -> int:
        return sum(load["num_running_reqs"] for load in self._json("GET", "/v1/loads")["loads"])

    @contextmanager
    def _connection(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            yield connection
        finally:
            connection.close()

    def _ask(self, method: str, path: str, body: dict | None = None) -> tuple[int, bytes]:
        with self._connection() as connection:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def _json(self, method: str, path: str, body: dict | None = None) -> dict:
        status, content = self._ask(method, path, body)
        if status != 200:
            raise EngineError(f"{path} answered {status}: {content[:300]!r} ({self.log})")
        return json.loads(content)


def check_requests(server: Server, rows: list[dict]) -> dict:
    """Twice as many requests as prompts at once, a chat, a client that hangs up in between, then the same again."""
    with ThreadPoolExecutor(2 * len(rows) + 2) as pool:
        chat = pool.submit(server.chat, "Hello")
        gone = pool.submit(server.hang_up, rows[0])
        answers = list(pool.map(server.generate, rows * 2))
    gone.result()
    wrong = checks.wrong_tokens(rows * 2, answers)
    if not chat.result():
        wrong.append("the chat answered nothing")
    end = time.monotonic() + 10
    while (running := server.running()) and time.monotonic() < end:
        time.sleep(0.1)
    if running:
        wrong.append(f"{running} requests still run 10 s after the client hung up")
    wrong += [f"after it: {line}" for line in checks.wrong_tokens(rows, [server.generate(row) for row in rows])]
    return {"ok": not wrong, "wrong": wrong}


def check_end(server: Server, name: str) -> dict:
    """A signal, by name, to the first process: no process and no shared memory stays.

    SIGKILL comes in the middle of a request; others without one, because SGLang would finish it first.
    """
    with server.busy() if name == "SIGKILL" else nullcontext():
        shared = shared_memory(server.members())
        os.kill(server.popen.pid, signal.Signals[name])
        left = server.wait_for_end()
    kept = sorted(path for path in shared if Path(path).exists())
    ours = [path for path in kept if not path.startswith(_OF_SGLANG)]
    wrong = [f"processes still run: {left}"] * bool(left) + [f"shared memory stays: {ours}"] * bool(ours)
    return {"ok": not wrong, "left_by_sglang": [path for path in kept if path not in ours], "wrong": wrong}


def shared_memory(processes: list[int]) -> set[str]:
    """Files of shared memory that these have mapped."""
    found = set()
    for process in processes:
        with suppress(OSError):
            maps = Path(f"/proc/{process}/maps").read_text()
            found.update(re.findall(rf"{_SHARED_MEMORY}/\S+(?= *$)", maps, re.MULTILINE))
    return found


def _greedy(tokens: int) -> dict:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
