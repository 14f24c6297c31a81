"""`kt run` as a process of its own, asked over HTTP with streams, as its users do."""

import atexit
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time

from kt_kernel.bench.prompts import prompt

_START = "import sys; from kt_kernel.cli.main import main; main(sys.argv[1:])"


class HttpSide:
    """Answers the requests of ``client``; every public method is one."""

    def __init__(self) -> None:
        self._server: subprocess.Popen | None = None
        self._address = ""
        self._vocabulary = 0

    def open(self, path: str, vocabulary: int, method: str, threads: int, slots: int, context: int) -> dict:
        self._vocabulary = vocabulary
        options = {"port": 0, "method": method, "threads": threads, "slots": slots, "context": context, "grace": 0}
        arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-c", _START, "run", path, "--engine", "embedded", "--no-plan", "--quiet"]
        self._server = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "KT_LANG": "en"},  # what it prints is read below
        )
        atexit.register(self.close)  # nobody else would stop it
        for line in self._server.stdout:
            if found := re.search(r"API\s+http://([^/]+)/v1", line):
                self._address = found[1]
            if "try" in line:
                return {}
        raise RuntimeError(f"kt run ended with {self._server.wait()}")

    def close(self) -> dict:
        self._server.terminate()
        self._server.wait()
        return {}

    def decode(self, seed: int, batch: int, prompt_tokens: int, steps: int) -> dict:
        """Sum of what the streams get; each counts from its first piece of text to its end."""
        rates: list[float] = []
        threads = [
            threading.Thread(target=lambda i=index: rates.append(self._stream(seed, i, prompt_tokens, steps + batch)))
            for index in range(batch)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(rates) < batch:
            raise RuntimeError(f"of {batch} streams {batch - len(rates)} failed")
        return {"tokens_per_s": sum(rates)}

    def _stream(self, seed: int, index: int, prompt_tokens: int, tokens: int) -> float:
        connection = http.client.HTTPConnection(self._address, timeout=600)
        body = {
            "prompt": prompt(seed, index, prompt_tokens, self._vocabulary),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {answer.read().decode()}")
        first = last = 0.0
        for line in answer:
            if line.startswith(b"data: {"):
                last = time.perf_counter()
                first = first or last
        connection.close()
        return (tokens - 1) / (last - first)
