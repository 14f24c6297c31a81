"""What SGLang reaches once it is up: one short answer that nobody asked for, through its HTTP interface.

``kt run`` becomes SGLang, so somebody else has to ask: a process that is nobody's child (SGLang would have to wait for
it), ends when it has told, with the server, or at a Ctrl-C. It asks as soon as the server is up, when hardly anybody
else does.
"""

import http.client
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kt_kernel.launch import reached

_PROMPT, _TOKENS = range(32, 64), 48
_POLL_S = 0.5
_ANSWER_S = 60.0  # the first prompt may compile kernels
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Server:
    pid: int
    host: str
    port: int
    key: str | None
    promised: float  # tokens per second of one answer


def follow(host: str, port: int, key: str | None, promised: float) -> None:
    """Starts to wait for the server that this process is about to become."""
    server = Server(os.getpid(), _EVERYWHERE.get(host, host), port, key, promised)
    # By stdin, not as an argument: others may read those, and the key is in it.
    subprocess.run([sys.executable, "-m", __name__], input=json.dumps(asdict(server)), text=True, check=False)


def measure(server: Server) -> float | None:
    """Tokens per second of one answer, without its prompt; None where the server does not tell."""
    body = {
        "input_ids": list(_PROMPT),
        "sampling_params": {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True},
        "stream": True,
    }
    times: dict[int, float] = {}  # when there were so many tokens
    connection = http.client.HTTPConnection(server.host, server.port, timeout=_ANSWER_S)
    try:
        connection.request("POST", "/generate", json.dumps(body), _headers(server))
        answer = connection.getresponse()
        for line in answer if answer.status == 200 else ():
            if line.startswith(b"data: {"):
                times[json.loads(line[6:])["meta_info"]["completion_tokens"]] = time.perf_counter()
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    finally:
        connection.close()
    if len(times) < 2:
        return None
    first, last = min(times), max(times)
    return (last - first) / (times[last] - times[first])


def _headers(server: Server) -> dict[str, str]:
    key = {"Authorization": f"Bearer {server.key}"} if server.key else {}
    return {"Content-Type": "application/json", **key}


def _is_up(server: Server) -> bool:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/health", headers=_headers(server))
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _runs(pid: int) -> bool:
    """Not one that has ended and is still waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def watch(server: Server) -> None:
    while not _is_up(server):
        if not _runs(server.pid):
            return
        time.sleep(_POLL_S)
    rate = measure(server)
    if rate is not None and _runs(server.pid):
        reached.tell(rate, server.promised)


def main() -> None:
    with suppress(KeyboardInterrupt):
        server = Server(**json.load(sys.stdin))
        if os.fork() == 0:
            watch(server)


if __name__ == "__main__":
    main()
