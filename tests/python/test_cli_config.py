"""`kt config` and `kt version`, `kt` alone, and completion in shells."""

import os
import platform
import pty
import subprocess

import pytest
import yaml
from cli_cases import KT, run, run_alone

import kt_kernel
from kt_kernel import settings
from kt_kernel.cli import printing, version
from kt_kernel.cli.main import command


@pytest.fixture
def kt(home, capfd):
    return lambda *arguments: run(capfd, *arguments)


def test_set_get_show_reset(kt):
    assert kt("config", "set", "server.port", "1").out == "server.port: 1\n"
    assert yaml.safe_load(settings.path().read_text()) == {"server": {"port": 1}}
    assert kt("config", "get", "server.port").out == "1\n"
    assert kt("config", "get", "server.port", "--json").json() == {"server.port": 1}
    assert kt("config", "set", "general.color", "yes").out == "general.color: true\n"
    assert kt("config", "show", "--json").json()["general.color"] is True
    assert kt("config", "show", "server.port").out == "server.port: 1 (set)\n  Port of servers.\n"
    assert "server.host: 127.0.0.1\n" in kt("config", "show").out
    assert kt("config", "reset", "server.port").out == f"server.port: {settings.SETTINGS['server.port'].default}\n"
    assert kt("config", "reset", "--yes").code == 0
    assert yaml.safe_load(settings.path().read_text()) == {}


def test_values_are_shown_as_they_are_given(kt):
    texts = {"paths.models": "/a,/b", "inference.cpu_threads": "auto", "advanced.env": '{"A": "1"}'}
    for name, text in texts.items():
        assert kt("config", "set", name, text).code == 0
        assert kt("config", "get", name).out == f"{text}\n"


def test_the_path_is_all_that_is_printed(kt, home):
    assert kt("config", "path").out == f"{home}/.config/kt-kernel/config.yaml\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("get", "server.prot"),
            1,
            "kt config get: no setting is called 'server.prot'; is it server.port, server.host?",
        ),
        (
            ("set", "server.port", "x"),
            1,
            "kt config set: server.port cannot be 'x': needed is a whole number from 0 to",
        ),
        (("reset",), 1, "kt config reset: all settings would go: name one, or add --yes"),
        (("set", "server.port"), 2, "kt config set: Missing argument"),
        (("nothing",), 2, "kt config: No such command 'nothing'"),
    ],
)
def test_what_is_refused(kt, arguments, code, message):
    said = kt("config", *arguments)
    assert said.code == code
    assert said.line().startswith(message)


def test_a_damaged_file_is_one_line(kt):
    settings.path().parent.mkdir(parents=True)
    settings.path().write_text("server: [")
    assert "config.yaml is no YAML" in kt("config", "show").line()


def test_reset_asks_on_a_terminal_only(home):
    settings.set("server.port", "1")
    leader, follower = pty.openpty()
    with subprocess.Popen([*KT, "config", "reset"], stdin=follower, stderr=subprocess.PIPE) as process:
        os.close(follower)
        os.write(leader, b"n\n")
        asked = process.stderr.read().decode()
    os.close(leader)
    assert "Set all settings back?" in asked
    assert process.returncode == 130
    assert settings.get("server.port") == 1


def test_a_group_alone_shows_its_help(kt):
    said = kt("config")
    assert said.code == 2
    assert said.err.startswith("Usage: kt config")


def test_version_as_the_readmes_show_it(kt, monkeypatch):
    monkeypatch.setattr(version, "cuda_version", lambda: "12.8")
    title, empty, *rows = kt("version").out.splitlines()
    assert title == f"KTransformers CLI v{kt_kernel.__version__}"
    assert empty == ""
    assert dict(row.split(maxsplit=1) for row in rows) == {
        "Python:": platform.python_version(),
        "Platform:": f"{platform.system()} {platform.release()}",
        "CUDA:": "12.8",
        "kt-kernel:": f"{kt_kernel.__version__} ({kt_kernel.__cpu_variant__})",
        "sglang:": version.package_version("sglang") or version.package_version("sglang-kt") or "not found",
    }
    assert "torch:" in kt("version", "-v").out
    assert f"variant {kt_kernel.__cpu_variant__}:" in kt("version", "--verbose").out


def test_version_as_json(kt):
    said = kt("version", "--json").json()
    assert (said["kt-kernel"], said["cpu_variant"]) == (kt_kernel.__version__, kt_kernel.__cpu_variant__)
    assert said["packages"]["torch"].startswith("2.")
    assert said["cpu_variants"][kt_kernel.__cpu_variant__] == "runs"
    assert kt("--version").out == f"kt-kernel {kt_kernel.__version__} ({kt_kernel.__cpu_variant__})\n"


def test_the_first_run_asks_nothing_and_writes_nothing(home):
    said = run_alone(HOME=str(home))
    assert said.code == 0
    assert said.out.startswith("Usage: kt ")
    assert said.err == ""
    assert list(home.iterdir()) == []


def test_chinese_through_the_entry_point(home):
    said = run_alone("config", "get", "server.prot", KT_LANG="zh")
    assert said == (1, "", "kt config get: 没有名为 'server.prot' 的设置；是不是 server.port, server.host？\n")


def test_a_terminal_that_has_no_chinese_gets_question_marks(home):
    said = run_alone("version", "-v", KT_LANG="zh", PYTHONIOENCODING="ascii")
    assert (said.code, said.err) == (0, "")
    assert "??" in said.out


@pytest.mark.parametrize(("variable", "setting"), [("1", "yes"), ("", "no"), ("", "yes")])
def test_colours_can_be_switched_off(home, monkeypatch, variable, setting):
    monkeypatch.setenv("NO_COLOR", variable)
    settings.set("general.color", setting)
    assert printing.console().no_color == (variable == "1" or setting == "no")


def commands(found, path=("kt",)):
    yield path, found
    for name, child in getattr(found, "commands", {}).items():
        yield from commands(child, (*path, name))


def test_every_command_has_help_with_an_example():
    group = command()
    for path, found in commands(group):
        assert found.help, path
        if not getattr(found, "commands", None):
            assert " ".join(path) in f"{found.help} {found.epilog}", path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("config", "get", "server."), ["server.host", "server.port"]),
        (("model", "info", "mixt"), ["mixtral"]),
        (("model", "path-"), ["path-list", "path-add", "path-remove"]),
    ],
)
def test_completion_of_commands_settings_and_models(kt, monkeypatch, words, expected):
    monkeypatch.setenv("_KT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["kt", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert kt().out.split() == expected


def test_the_completion_script_can_be_shown_and_installed(kt, home, monkeypatch):
    # Then the shell is named, else it is the one that runs kt.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "complete -o default -F _kt_completion kt" in kt("--show-completion", "bash").out
    done = kt("--install-completion", "bash")
    assert done.code == 0, done
    assert "_KT_COMPLETE=complete_bash" in (home / ".bash_completions" / "kt.sh").read_text()
    assert "kt.sh" in (home / ".bashrc").read_text()


def test_json_of_a_fresh_home_is_whole(kt):
    for arguments in (("config", "show"), ("model", "list"), ("model", "list", "--all"), ("version",)):
        assert kt(*arguments, "--json").json()
