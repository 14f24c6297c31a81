"""What is under `kt run`: who decides, SGLang's command line and its own options, what an engine reaches."""

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from plan_cases import GB, H200, RTX_4090, machine
from scripted_engine import ScriptedEngine

from kt_kernel import settings
from kt_kernel.engine.api import Request
from kt_kernel.errors import UserError
from kt_kernel.launch import reached, sglang
from kt_kernel.launch.job import Asked, prepare
from kt_kernel.launch.preferences import CONFIG, OPTION, REGISTRY, Preferences
from kt_kernel.launch.sglang_options import choose_tensor_parallel
from kt_kernel.registry.known import Known

FAKE_SGLANG = """
import sys
if "--help" in sys.argv:
    print("usage: launch_server [--host HOST] [--kt-method KT_METHOD]\\n  --model MODEL  --kt-weight-path PATH")
    sys.exit(0)
print(" ".join(sys.argv[1:]))
sys.exit(7)
"""


def test_who_decides(home):
    known = Known("m", "org/m", options={"cpu_threads": 3, "watchdog_timeout": 5, "fp8_gemm_backend": "triton"})
    preferences = Preferences({"cpu_threads": 1, "gpu_experts": None}, known)
    settings.set("inference.cpu_threads", "2")
    settings.set("inference.gpu_experts", "4")
    assert (preferences.get("cpu_threads").value, preferences.get("cpu_threads").source) == (1, OPTION)
    assert (preferences.get("gpu_experts").value, preferences.get("gpu_experts").source) == (4, CONFIG)
    assert (preferences.get("watchdog_timeout").value, preferences.get("watchdog_timeout").source) == (5, REGISTRY)
    assert preferences.get("attention_backend").value is None
    assert preferences.sources(threads="cpu_threads", gpu_experts="gpu_experts") == {"gpu_experts": "config.yaml"}
    assert preferences.others(frozenset({"cpu_threads", "watchdog_timeout"})) == {"fp8_gemm_backend": "triton"}


def test_the_command_line():
    options = [("host", "h"), ("a-switch", True), ("not-this", False), ("nor-this", None), ("list", (1, 2))]
    launch = sglang.make_launch(options, ["--x", "a b"], {"A": "1 2"}, frozenset())
    assert launch.command[3:] == ("--host", "h", "--a-switch", "--list", "1", "2", "--x", "a b")
    assert launch.as_shell().startswith(f"A='1 2' {sys.executable} -m sglang.launch_server --host h")
    assert launch.as_shell().endswith("--x 'a b'")


def test_kt_options_that_sglang_does_not_know_are_left_out():
    options = [("kt-method", "BF16"), ("kt-new", 5), ("unknown", 1)]
    launch = sglang.make_launch(options, [], {}, frozenset({"--kt-method"}))
    assert launch.command[3:] == ("--kt-method", "BF16", "--unknown", "1")
    assert launch.left_out == ("--kt-new",)


@pytest.fixture
def fake_sglang(home, tmp_path, monkeypatch):
    package = tmp_path / "fake" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(FAKE_SGLANG)
    found = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{found}" if found else str(package.parent))
    return package


def test_sglang_is_asked_once_what_it_knows(fake_sglang):
    assert sglang.known_options() == {"--host", "--kt-method", "--model", "--kt-weight-path"}
    (fake_sglang / "launch_server.py").write_text("raise SystemExit(1)")
    assert "--kt-method" in sglang.known_options()


def test_an_sglang_that_does_not_start_says_why(fake_sglang):
    (fake_sglang / "launch_server.py").write_text("raise ImportError('no flashinfer')")
    with pytest.raises(UserError, match=r"ImportError: no flashinfer; 'kt doctor'"):
        sglang.known_options()


def test_the_exit_code_is_sglangs(fake_sglang):
    code = (
        "from kt_kernel.launch import sglang\n"
        "sglang.start(sglang.make_launch([('host', 'h')], ['--x'], {'A': '1'}, frozenset()))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (7, "--host h --x\n")


@pytest.mark.parametrize(("gpus", "most", "size"), [(0, None, 1), (1, None, 1), (3, None, 2), (8, None, 8), (8, 4, 4)])
def test_tensor_parallel_is_a_power_of_two(home, gpus, most, size):
    assert choose_tensor_parallel(machine(gpus=(H200,) * gpus), Preferences({}, None), most).value == size


def test_nodes_by_count_or_by_number(home):
    here = machine(80 * GB, nodes=4)

    def nodes(*given):
        job = prepare(Asked("qwen3-30b", {"numa_nodes": list(given)}), here, None, sglang=False, only_shown=True)
        return job.chosen.choices["numa nodes"].value

    assert nodes() == (0, 1, 2, 3)
    assert nodes(2) == (0, 1)
    assert nodes(3, 1) == (3, 1)
    with pytest.raises(UserError, match="--numa-nodes 5"):
        nodes(5)
    with pytest.raises(UserError, match="no NUMA node 9"):
        nodes(0, 9)
    settings.set("inference.numa_nodes", "2")
    assert nodes() == (0, 1)


def test_the_registrys_requests_are_not_slots_of_the_embedded_engine(home):
    here = machine(800 * GB, gpus=(RTX_4090,))
    embedded = prepare(Asked("m2", {}), here, None, sglang=False, only_shown=True)
    assert embedded.wanted.slots is None
    assert embedded.method == "FP8"
    split = prepare(Asked("m2", {}), here, None, sglang=True, only_shown=True)
    assert split.engine.value == "sglang"
    assert (split.wanted.slots, split.wanted.sources["slots"]) == (16, REGISTRY)


def test_a_model_is_fetched_only_to_be_started(home, tmp_path):
    def refuse(found):
        raise UserError("no")

    shown = prepare(Asked("m2", {}), machine(), refuse, only_shown=True)
    assert shown.chosen is not None
    assert shown.folder == settings.model_folders()[0] / "MiniMax-M2"
    with pytest.raises(UserError, match=r"^no$"):
        prepare(Asked("m2", {"planned": False}), machine(), refuse)


def test_what_does_not_fit_is_not_downloaded(home):
    def fetch(found):
        pytest.fail("downloaded")

    with pytest.raises(UserError, match=r"MiniMax-M2 needs 2\d\d GB of memory, but there are 64: 'kt plan"):
        prepare(Asked("m2", {}), machine(), fetch)


def test_what_an_engine_reaches():
    engine = ScriptedEngine(step_seconds=0.002)
    try:
        told = []
        reached.watch(engine, told.append, patience_s=0).join(30)
        assert told == [pytest.approx(500)]  # as the engine counts its own steps
    finally:
        engine.close()


def test_nobody_has_to_wait_for_it():
    engine = ScriptedEngine(step_seconds=0.05)
    try:
        engine.submit(Request(prompt=tuple(b"a question of somebody"), max_tokens=5), lambda event: None)
        start = time.perf_counter()
        assert reached.measure_decode(engine) is None
        assert time.perf_counter() - start < 0.5
    finally:
        engine.close()


def test_it_is_given_up_when_somebody_asks():
    engine = ScriptedEngine(step_seconds=0.05)
    try:
        told = []
        watching = reached.watch(engine, told.append, patience_s=0)
        while not engine.stats().running:
            time.sleep(0.001)
        engine.submit(Request(prompt=tuple(b"a question of somebody")), lambda event: None)
        watching.join(30)
        assert told == []
        assert engine.stats().finished.get("length", 0) == 0
    finally:
        engine.close()


def test_a_closed_engine_is_left_alone():
    engine = ScriptedEngine()
    engine.close()
    assert reached.measure_decode(engine) is None


class AnsweringSGLang(http.server.BaseHTTPRequestHandler):
    """Up at the second look; an answer of four tokens, 20 ms apart, to whoever has the key."""

    looks = 0
    asked = threading.Event()

    def do_GET(self):
        type(self).looks += 1
        self.send_response(200 if self.looks > 1 else 503)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = body["stream"] and self.headers["Authorization"] == "Bearer secret"
        self.send_response(200 if known else 401)
        self.end_headers()
        for count in range(1, 5) if known else ():
            time.sleep(0.02)
            self.wfile.write(b"data: " + json.dumps({"meta_info": {"completion_tokens": count}}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
        self.asked.set()

    def log_message(self, *_):
        pass


@pytest.fixture
def answering_sglang():
    AnsweringSGLang.looks = 0
    AnsweringSGLang.asked.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), AnsweringSGLang) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


# Is followed, as `kt run` is before it becomes SGLang.
FOLLOWED = """
import sys, time
from kt_kernel.launch import sglang_reached
sglang_reached.follow("0.0.0.0", int(sys.argv[1]), sys.argv[2], 1000.0)
print("followed", file=sys.stderr, flush=True)
time.sleep(60)
"""


@contextmanager
def followed(port: int, key: str):
    command = [sys.executable, "-c", FOLLOWED, str(port), key]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "followed\n"
        try:
            yield process
        finally:
            process.kill()


def test_what_sglang_reaches(home, answering_sglang):
    with followed(answering_sglang, "secret") as process:
        said = re.fullmatch(
            r"kt run: reached: ([\d.]+) tokens/s of one answer, \d+ % of what was promised\n",
            process.stderr.readline(),
        )
        assert said
        assert 5 < float(said[1]) < 60
        assert process.stderr.readline() == "kt run: 'kt doctor' looks for the reason\n"


def test_whoever_waits_for_sglang_ends_with_it(home, answering_sglang):
    """Who holds stderr has not ended."""
    with followed(answering_sglang, "wrong") as process:
        assert AnsweringSGLang.asked.wait(30)
        process.kill()
        assert process.stderr.read() == ""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with followed(unused.getsockname()[1], "secret") as process:
            process.kill()
            assert process.stderr.read() == ""
