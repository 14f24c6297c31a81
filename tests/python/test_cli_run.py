"""`kt run`: what it refuses before anything heavy, and what it does with an engine."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine
from server_cases import QUICK

from kt_kernel.cli import run as command
from kt_kernel.cli.main import main
from kt_kernel.server import serving


def kt(*arguments) -> int:
    with pytest.raises(SystemExit) as end:
        main(["run", *arguments])
    return end.value.code


@pytest.fixture(autouse=True)
def _own_logging():
    """The command sets up logging for its process; here that is everybody's."""
    loggers = [logging.getLogger(name) for name in ("kt_kernel", "kt_kernel.server", "uvicorn.error")]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


def one_line(capsys) -> str:
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1, said.err
    return said.err


@pytest.fixture
def started(monkeypatch):
    """What `kt run` would serve, and how, instead of serving it."""
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
    monkeypatch.delenv("KT_KERNEL_API_KEY", raising=False)
    return seen


def test_wrong_usage(capsys):
    assert kt() == 2
    assert "model" in one_line(capsys).lower()
    assert kt("demo", "--port", "70000") == 2
    assert "--port" in one_line(capsys)
    assert kt("demo", "--threads", "100000") == 2
    assert "--threads" in one_line(capsys)
    assert kt("demo", "--linears", "int3") == 2
    assert "'int3' is not one of auto, bf16, int8" in one_line(capsys)


def test_what_is_no_model(capsys, tmp_path):
    assert kt(str(tmp_path / "nowhere"), "--port", "0") == 1
    assert "does not exist: give the folder of a model" in one_line(capsys)
    (tmp_path / "file").touch()
    assert kt(str(tmp_path / "file"), "--port", "0") == 1
    assert "is a file" in one_line(capsys)


def test_a_port_that_is_taken_is_told_before_the_model_is_looked_at(capsys):
    with serving.bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert kt("/nowhere", "--port", str(port)) == 1
        assert f"127.0.0.1:{port} (Address already in use)" in one_line(capsys)


def test_missing_packages_are_one_line(capsys, monkeypatch):
    found = command.find_spec
    monkeypatch.setattr(command, "find_spec", lambda name: None if name in ("uvicorn", "msgspec") else found(name))
    assert kt("demo") == 1
    assert one_line(capsys) == "kt run: msgspec, uvicorn not found: pip install 'kt-kernel[engine]'\n"


def test_what_is_looked_for_is_what_the_extra_installs():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    [extra] = re.findall(r"^engine = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r'^  "([\w-]+)', extra, re.MULTILINE)) == command._NEEDED


def test_options_reach_the_engine_and_the_server(capsys, started, tmp_path):
    given = {"port": 0, "slots": 3, "context": 100, "threads": 1, "method": "BF16", "max-queue": 7, "name": "mine"}
    given["linears"] = "torch"
    given |= {"api-key": "k", "max-tokens": 9, "grace": 4}
    arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    arguments += ["--cors", "https://a.example", "--cors", "https://b.example", "--strict-model"]
    assert kt(str(tmp_path), *arguments) == 0
    assert started["path"] == str(tmp_path)
    engine = {name: started[name] for name in ("name", "slots", "context", "threads", "method", "max_queue")}
    assert engine == {"name": "mine", "slots": 3, "context": 100, "threads": 1, "method": "BF16", "max_queue": 7}
    assert started["linears"] is None
    settings = started["settings"]
    assert (settings.api_key, settings.cors) == ("k", ("https://a.example", "https://b.example"))
    assert settings.limits.in_flight > 7
    assert (settings.limits.max_tokens, settings.grace_seconds, settings.strict_model) == (9, 4, True)
    assert set(settings.hosts) >= {"127.0.0.1", "localhost"}
    said = capsys.readouterr()
    url = f"http://127.0.0.1:{started['bound'][1]}"
    assert f"  chat page  {url}/\n" in said.out
    assert f"curl {url}/v1/chat/completions" in said.out
    assert "$KT_KERNEL_API_KEY" in said.out
    assert "embedded engine" in said.err
    assert "Bearer k" not in said.out


def test_the_key_can_come_from_the_environment(started, monkeypatch, tmp_path):
    monkeypatch.setenv("KT_KERNEL_API_KEY", "hidden")
    assert kt(str(tmp_path), "--port", "0") == 0
    assert started["settings"].api_key == "hidden"


def test_an_open_network_without_a_key_is_pointed_out(capsys, started, tmp_path):
    assert kt(str(tmp_path), "--port", "0", "--host", "0.0.0.0") == 0
    assert started["settings"].hosts == ()
    assert "--api-key" in capsys.readouterr().err


def test_an_engine_that_cannot_be_opened_is_one_line(capsys, tmp_path):
    pytest.importorskip("transformers")
    assert kt(str(tmp_path), "--port", "0") == 1
    assert "has no config.json" in capsys.readouterr().err.strip().splitlines()[-1]


def test_the_command_loads_nothing_heavy_before_it_is_used():
    code = (
        "import sys, kt_kernel.cli.main; print([m for m in ('torch', 'transformers', 'uvicorn') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "uvicorn" not in said.stdout
    assert "transformers" not in said.stdout


def test_the_default_settings_guard_this_machine_only():
    assert set(QUICK.hosts) <= set(command._settings("127.0.0.1", None, None, None, False, 1.0).hosts)
