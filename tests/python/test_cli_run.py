"""`kt run`: what it refuses before anything heavy, what it chooses, and what it does with an engine."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import run
from plan_cases import GB, H200, FakeProbe, machine, write_config
from scripted_engine import ScriptedEngine
from server_cases import QUICK

from kt_kernel import settings
from kt_kernel.cli import run as command
from kt_kernel.launch import embedded, job, sglang, sglang_reached
from kt_kernel.machine import facts
from kt_kernel.machine import probe as probes
from kt_kernel.plan import choices
from kt_kernel.server import serving


@pytest.fixture(autouse=True)
def _own_logging(home):
    """The command sets up logging for its process; here that is everybody's."""
    loggers = [logging.getLogger(name) for name in ("kt_kernel", "kt_kernel.server", "uvicorn.error")]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


@pytest.fixture
def started(monkeypatch):
    """What `kt run` would serve, and how, instead of serving it; the machine's probe takes no time."""
    seen = {}

    def open_engine(path, **options):
        seen.update(path=path, **options)
        return ScriptedEngine()

    def serve(engine, bound, settings, on_started):
        seen.update(settings=settings, bound=bound.getsockname())
        on_started()
        engine.close()

    load = pytest.importorskip("kt_kernel.engine.load")
    monkeypatch.setattr(load, "open_engine", open_engine)
    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(probes, "Probe", lambda found, threads, **_: FakeProbe(threads))
    monkeypatch.setattr("kt_kernel.launch.reached.watch", lambda engine, tell: seen.update(watched=tell))
    monkeypatch.delenv("KT_KERNEL_API_KEY", raising=False)
    return seen


@pytest.fixture
def model(tmp_path):
    """A folder that can be planned, and whose weights nobody reads."""
    return write_config(tmp_path / "mine", num_hidden_layers=2)


@pytest.fixture
def with_sglang(monkeypatch):
    """SGLang is installed, knows all options, and there is a GPU; `launched` is what would have been started."""
    launched = []
    monkeypatch.setattr(facts, "machine", lambda: machine(80 * GB, nodes=2, gpus=(H200,)))
    for module in (choices, job):
        monkeypatch.setattr(module, "has_sglang", lambda: True)
    monkeypatch.setattr(job, "known_options", lambda: frozenset())
    monkeypatch.setattr(sglang, "start", launched.append)
    monkeypatch.setattr(sglang_reached, "follow", lambda *server: launched.append(server))
    monkeypatch.setattr(probes, "Probe", lambda found, threads, **_: FakeProbe(threads))
    return launched


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a model"),
        (["demo", "--port", "70000"], "--port"),
        (["demo", "--threads", "100000"], "--threads"),
        (["demo", "--linears", "int3"], "'int3' is not one of auto, bf16, int8"),
        (["demo", "--engine", "vllm"], "'vllm' is not one of embedded, sglang"),
        (["demo", "--json"], "goes with --dry-run"),
        (["demo", "--mem-fraction-static", "0.5"], "--mem-fraction-static: the embedded engine does not know it"),
        (["demo", "--unheard-of", "3"], "--unheard-of: the embedded engine does not know it"),
        (["demo", "another"], "another"),
        (["--unheard-of", "3", "demo"], "put MODEL before --unheard-of"),
        (["demo", "--model-path", "x"], "named twice"),
    ],
)
def test_wrong_usage(capfd, arguments, words):
    said = run(capfd, "run", *arguments)
    assert said.code == 2
    assert words in said.line()


def test_what_is_no_model(capfd, tmp_path):
    said = run(capfd, "run", tmp_path / "nowhere", "--port", "0")
    assert said.code == 1
    assert "does not exist: give the folder of a model" in said.line()
    assert "no model is called 'qwen3-30'; did you mean" in run(capfd, "run", "qwen3-30", "--port", "0").line()


def test_a_model_that_is_not_here_is_not_downloaded_without_a_word(capfd):
    said = run(capfd, "run", "qwen3-30b", "--port", "0", "--no-plan")
    assert said.code == 1
    assert "'kt model download Qwen3-30B-A3B' brings it, or --yes" in said.line()


def test_a_model_that_is_not_here_is_downloaded_with_yes(capfd, monkeypatch, started, model):
    from kt_kernel.cli import model_files
    from kt_kernel.registry import download
    from kt_kernel.registry.user_models import UserModel

    asked = []

    def prepare(repo, folder):
        asked.append((repo, folder))
        return download.Download(repo, "1", model, (), None)

    monkeypatch.setattr(download, "prepare", prepare)

    def bring(command, wanted, name):
        asked.append((command, name))
        return UserModel(name, str(wanted.folder))

    monkeypatch.setattr(model_files, "bring", bring)
    said = run(capfd, "run", "qwen3-30b", "--port", "0", "--yes", "--no-plan")
    assert said.code == 0
    assert asked == [("Qwen/Qwen3-30B-A3B", settings.model_folders()[0] / "Qwen3-30B-A3B"), ("run", "Qwen3-30B-A3B")]
    assert started["path"] == str(model)


def test_a_port_that_is_taken_is_told_before_the_model_is_looked_at(capfd):
    with serving.bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        said = run(capfd, "run", "/nowhere", "--port", port)
        assert said.code == 1
        assert f"127.0.0.1:{port} (Address already in use)" in said.line()


def test_missing_packages_are_one_line(capfd, monkeypatch):
    found = command.find_spec
    monkeypatch.setattr(command, "find_spec", lambda name: None if name in ("uvicorn", "msgspec") else found(name))
    said = run(capfd, "run", "demo")
    assert said.code == 1
    assert said.line() == "kt run: msgspec, uvicorn not found: pip install 'kt-kernel[engine]'"


def test_a_python_that_the_extra_does_not_install_on_is_told(capfd, monkeypatch):
    found = command.find_spec
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "transformers" else found(name))
    monkeypatch.setattr(command, "_ENGINE_PYTHON", (9, 0))
    assert "the embedded engine needs Python 3.11 or newer" in run(capfd, "run", "demo").line()


def test_what_is_looked_for_is_what_the_extra_installs():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    [extra] = re.findall(r"^engine = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r'^  "([\w-]+)', extra, re.MULTILINE)) == command._NEEDED


def test_options_reach_the_engine_and_the_server(capfd, started, model):
    given = {"port": 0, "slots": 3, "context": 100, "threads": 1, "method": "BF16", "max-queue": 7, "name": "mine"}
    given["linears"] = "torch"
    given |= {"api-key": "k", "max-tokens": 9, "grace": 4}
    arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    arguments += ["--cors", "https://a.example", "--cors", "https://b.example", "--strict-model"]
    said = run(capfd, "run", model, *arguments)
    assert said.code == 0
    assert started["path"] == str(model)
    engine = {name: started[name] for name in ("name", "slots", "context", "threads", "method", "max_queue")}
    assert engine == {"name": "mine", "slots": 3, "context": 100, "threads": 1, "method": "BF16", "max_queue": 7}
    assert started["linears"] is None
    found = started["settings"]
    assert (found.api_key, found.cors) == ("k", ("https://a.example", "https://b.example"))
    assert found.limits.in_flight > 7
    assert (found.limits.max_tokens, found.grace_seconds, found.strict_model) == (9, 4, True)
    assert set(found.hosts) >= {"127.0.0.1", "localhost"}
    url = f"http://127.0.0.1:{started['bound'][1]}"
    assert f"  chat page  {url}/\n" in said.out
    assert f"  terminal   kt chat -H {url}\n" in said.out
    assert f"curl {url}/v1/chat/completions" in said.out
    assert "$KT_KERNEL_API_KEY" in said.out
    assert "kt run: engine: embedded (there is no GPU)" in said.err
    assert "Bearer k" not in said.out


def test_second_names_mean_the_same(capfd, started, model):
    given = {"port": 0, "max-running-requests": 3, "cpu-threads": 1, "kt-method": "AMXINT8", "served-model-name": "n"}
    arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    assert run(capfd, "run", "--model-path", model, *arguments).code == 0
    engine = {name: started[name] for name in ("name", "slots", "threads", "method")}
    assert engine == {"name": "n", "slots": 3, "threads": 1, "method": "AMXINT8"}


def test_the_promise_comes_before_and_what_was_reached_after(capfd, started, model):
    said = run(capfd, "run", model, "--port", "0")
    assert said.code == 0
    assert re.search(r"^kt run: expect decode at [\d.e+]+ tokens/s \(ms of a token: ", said.err, re.MULTILINE)
    assert "kt run: expect prompts at " in said.err
    started["watched"](50.0)
    said = capfd.readouterr().err
    assert "kt run: reached: 50 tokens/s of one answer, " in said
    assert "kt doctor" in said  # a small part of what was promised
    started.clear()
    said = run(capfd, "run", model, "--port", "0", "--no-plan")
    assert "expect" not in said.err
    assert "watched" not in started


def test_what_does_not_fit_is_refused_with_the_way_out(capfd, started, model, monkeypatch):
    monkeypatch.setattr(facts, "machine", lambda: machine(2 * GB))
    said = run(capfd, "run", model, "--port", "0", "--method", "BF16")
    assert said.code == 1
    last = said.err.splitlines()[-1]
    assert last.startswith("kt run: mine does not fit: ")
    assert last.endswith("--no-plan tries")
    assert "path" not in started
    assert run(capfd, "run", model, "--port", "0", "--method", "BF16", "--no-plan").code == 0


def test_a_model_without_experts_runs_without_a_plan(capfd, started, tmp_path):
    folder = write_config(tmp_path / "dense", num_experts=None)
    said = run(capfd, "run", folder, "--port", "0")
    assert said.code == 0
    assert "kt run: no plan: " in said.err
    assert started["method"] == "auto"


def test_options_go_before_settings_and_settings_before_what_is_computed(capfd, started, model):
    settings.set("inference.cpu_threads", "1")
    settings.set("inference.kt_method", "AMXINT8")
    settings.set("server.port", "0")
    said = run(capfd, "run", model)
    assert (started["threads"], started["method"]) == (1, "AMXINT8")
    assert "kt run: method: AMXINT8 (set in config.yaml)" in said.err
    said = run(capfd, "run", model, "--method", "INT4G")
    assert (started["threads"], started["method"]) == (1, "INT4G")
    assert "kt run: method: INT4G (asked for)" in said.err


def test_a_dry_run_of_the_embedded_engine(capfd, started, model):
    said = run(capfd, "run", model, "--dry-run", "--threads", "1", "--slots", "2")
    assert said.code == 0
    assert said.out.startswith(f"kt run {model} --engine embedded --slots 2 --threads 1 --method BF16 ")
    assert "path" not in started
    shown = run(capfd, "run", model, "--dry-run", "--json").json()
    assert shown["engine"] == "embedded"
    assert shown["choices"]["method"] == {
        "value": "BF16",
        "reason": "keeps the experts as the files have them, and fits",
    }
    assert shown["settings"]["host"] == "127.0.0.1"


def test_the_key_can_come_from_the_environment(capfd, started, monkeypatch, model):
    monkeypatch.setenv("KT_KERNEL_API_KEY", "hidden")
    assert run(capfd, "run", model, "--port", "0").code == 0
    assert started["settings"].api_key == "hidden"


def test_an_open_network_without_a_key_is_pointed_out(capfd, started, model):
    said = run(capfd, "run", model, "--port", "0", "--host", "0.0.0.0")
    assert said.code == 0
    assert started["settings"].hosts == ()
    assert "--api-key" in said.err


def test_an_engine_that_cannot_be_opened_is_one_line(capfd, tmp_path):
    pytest.importorskip("transformers")
    said = run(capfd, "run", tmp_path, "--port", "0")
    assert said.code == 1
    assert "has no config.json" in said.err.strip().splitlines()[-1]


def test_sglang_gets_the_command_and_every_option_a_reason(capfd, with_sglang, model):
    split = ("--gpu-experts", "2", "--tp", "1", "--attention-backend", "triton")
    said = run(capfd, "run", model, "--port", "0", *split, "--new-thing", "5")
    assert said.code == 0
    [watched, launch] = with_sglang
    assert watched[:3] == ("127.0.0.1", 0, None)
    assert watched[3] > 0
    words = list(launch.command)
    assert words[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert words[-2:] == ["--new-thing", "5"]
    found = {words[i]: words[i + 1] for i in range(3, len(words) - 1) if words[i].startswith("--")}
    assert found["--model"] == found["--kt-weight-path"] == str(model)
    assert (found["--kt-cpuinfer"], found["--kt-threadpool-count"]) == ("15", "2")
    assert (found["--kt-method"], found["--attention-backend"]) == ("BF16", "triton")
    assert found["--kt-num-gpu-experts"] == "2"
    assert "--trust-remote-code" not in words
    assert launch.environment["SGLANG_ENABLE_JIT_DEEPGEMM"] == "0"
    reasons = [line for line in said.err.splitlines() if line.startswith("kt run: --")]
    assert len(reasons) == len({word for word in words[3:-2] if word.startswith("--")})
    assert all(re.search(r" \(.+\)$", line) for line in reasons)
    assert "expect decode at" in said.err


def test_sglang_computes_alone_what_the_gpu_holds(capfd, with_sglang, model):
    said = run(capfd, "run", model, "--port", "0")
    assert said.code == 0
    words = with_sglang[-1].command
    assert "the GPU holds all experts" in said.err
    assert not any(word.startswith("--kt-") for word in words)
    assert not {"--max-total-tokens", "--disable-shared-experts-fusion"} & set(words)


def test_a_dry_run_of_sglang_needs_neither_it_nor_a_gpu(capfd):
    shown = run(capfd, "run", "m2", "--engine", "sglang", "--dry-run", "--json").json()
    assert shown["command"][shown["command"].index("--model") + 1] == "MiniMaxAI/MiniMax-M2"
    assert shown["choices"]["--tool-call-parser"]["reason"] == "set in the registry"
    assert "--trust-remote-code" in shown["command"]
    assert shown["shell"].startswith("PYTORCH_ALLOC_CONF=expandable_segments:True ")
    said = run(capfd, "run", "m2", "--engine", "sglang", "--dry-run")
    assert said.out == shown["shell"] + "\n"


def test_a_key_does_not_show_in_a_dry_run(capfd):
    said = run(capfd, "run", "m2", "--engine", "sglang", "--dry-run", "--api-key", "secret")
    assert "--api-key KEY" in said.out
    assert "secret" not in said.out + said.err


def test_options_of_the_embedded_engine_are_not_sglangs(capfd, with_sglang, model):
    said = run(capfd, "run", model, "--port", "0", "--context", "100")
    assert said.code == 2
    assert "--context: SGLang does not know it" in said.line()
    assert with_sglang == []


def test_settings_of_sglang(capfd, with_sglang, model):
    settings.set("advanced.sglang_args", "--log-level,debug")
    settings.set("inference.env", "{A: '1'}")
    settings.set("inference.mem_fraction_static", "0.5")
    shared = "--enable-shared-experts-fusion"
    assert run(capfd, "run", model, "--port", "0", "--no-plan", "--gpu-experts", "2", shared).code == 0
    [launch] = with_sglang  # nothing was promised, and nobody waits for what it reaches
    assert launch.command[-2:] == ("--log-level", "debug")
    assert launch.environment == {"A": "1"}
    assert launch.command[launch.command.index("--mem-fraction-static") + 1] == "0.5"
    assert "--disable-shared-experts-fusion" not in launch.command


def test_the_command_loads_nothing_heavy_before_it_is_used():
    code = (
        "import sys, kt_kernel.cli.main; print([m for m in ('torch', 'transformers', 'uvicorn') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "uvicorn" not in said.stdout
    assert "transformers" not in said.stdout


def test_the_default_settings_guard_this_machine_only():
    assert set(QUICK.hosts) <= set(embedded.server_settings("127.0.0.1", None, None, None, False, 1.0).hosts)
