"""The commands under a pseudo-terminal with a throw-away home: what they ask, what a screen holds, what Ctrl-C does."""

import re

import pytest
import yaml
from convert_cases import write_model
from fake_hub import FakeHub
from rich.cells import cell_len
from terminal import CTRL_C, terminal

COLOUR = re.compile(rb"\x1b\[[0-9;]*3[0-9][0-9;]*m")

# Commands that print and end, and something that they print in English.
QUICK = {
    "version -v": "KTransformers CLI",
    "config show": "server.port: 8000",
    "model list --all": "MiniMax-M2.1",
    "doctor --fast": "Instruction set",
}


@pytest.mark.parametrize("command", QUICK)
def test_what_a_screen_holds(tmp_path, command):
    """Tables are as wide as the screen at most: the terminal would break their lines."""
    with terminal(tmp_path, *command.split(), rows=200) as shown:
        assert shown.exit_code() in ((0, 1) if command.startswith("doctor") else (0,))
        assert QUICK[command] in shown.text
        assert "Traceback" not in shown.text
        rules = [number for number, line in enumerate(shown.lines) if line and set(line) == {"─"}]
        assert len(rules) == (0 if "config" in command or "version" in command else 1)


@pytest.mark.parametrize("changes", [{"KT_LANG": "zh"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_other_terminals(tmp_path, changes):
    with terminal(tmp_path, "doctor", "--fast", rows=100, **changes) as shown:
        assert shown.exit_code() in (0, 1)
        if "KT_LANG" in changes:
            assert "检查项" in shown.text
        else:
            assert not COLOUR.search(shown.raw)
        assert all(cell_len(line) <= 80 for line in shown.screen)


def test_settings_are_reset_only_after_a_yes(tmp_path):
    file = tmp_path / ".config/kt-kernel/config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("server: {port: 1}\n")
    for answer, code, left in (("n", 130, {"server": {"port": 1}}), ("y", 0, {})):
        with terminal(tmp_path, "config", "reset") as shown:
            shown.wait_for("Set all settings back?")
            shown.type(answer)
            assert shown.exit_code() == code
        assert yaml.safe_load(file.read_text()) == left


@pytest.mark.parametrize("command", ["verify", "doctor", "plan qwen3-30b"])
def test_ctrl_c_while_something_is_measured(tmp_path, command):
    with terminal(tmp_path, *command.split()) as shown:
        shown.wait_for_output()
        shown.type("", CTRL_C)
        assert shown.exit_code() == 130
        assert "Traceback" not in shown.text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], "half a measurement was kept"


def test_a_model_is_downloaded_only_after_a_yes(tmp_path):
    pytest.importorskip("huggingface_hub")
    files = {file.name: file.read_bytes() for file in write_model(tmp_path / "original").iterdir()}
    folder = tmp_path / ".local/share/kt-kernel/models/MiniMax-M2"
    with FakeHub({"MiniMaxAI/MiniMax-M2": files}) as hub:
        for command in (["run", "m2", "--no-plan", "--port", "0"], ["model", "download", "m2"]):
            with terminal(tmp_path, *command, HF_ENDPOINT=hub.address) as shown:
                shown.wait_for("]:")
                shown.type("n")
                assert shown.exit_code() == 130
                assert "Abort" not in shown.text
            assert not folder.exists() or not list(folder.glob("*.safetensors"))
        with terminal(tmp_path, "model", "download", "m2", HF_ENDPOINT=hub.address) as shown:
            shown.wait_for("]:")
            shown.type("y")
            assert shown.exit_code() == 0
            assert "MiniMax-M2 is in" in shown.text
    with terminal(tmp_path, "model", "remove", "m2") as shown:
        assert shown.exit_code() == 0
    assert list(folder.glob("*.safetensors")), "only the name goes"
