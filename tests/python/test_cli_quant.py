"""`kt quant` and scripts/convert_cpu_weights.py: the same conversion under two sets of options."""

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from convert_cases import LAYERS, contents, manifest, write_model

from kt_kernel import _core, settings
from kt_kernel.cli.main import main
from kt_kernel.registry import user_models
from kt_kernel.registry.user_models import UserModel

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert_cpu_weights.py"


def kt(*arguments) -> int:
    with pytest.raises(SystemExit) as end:
        main(["quant", *map(str, arguments)])
    return end.value.code


def script(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def test_defaults(model, capsys):
    assert kt(model) == 0
    out = model.parent / "model-AMXINT4"
    assert (manifest(out)["method"], manifest(out)["scales"]) == ("AMXINT4", "searched")
    shown, told = capsys.readouterr()
    assert "Errors of AMXINT4" in shown
    assert "worst tensors: layer" in shown
    assert "3 layers converted in" in shown
    assert f"--kt-weight-path {out} --kt-method AMXINT4" in " ".join(shown.split())
    assert "3 layers (1..4) of 4 experts, 96 x 160, stored as bf16" in told
    for layer in LAYERS:
        assert f"\nlayer {layer}: " in told
    assert "12 of 12 experts, 0:00:00 left" in told


def test_a_model_by_name_goes_where_the_settings_say(model, home, tmp_path, capsys):
    user_models.add(UserModel("mine", str(model)))
    settings.set("paths.weights", str(tmp_path / "weights"))
    assert kt("mine", "-m", "int8") == 0
    assert manifest(tmp_path / "weights" / "model-AMXINT8")["method"] == "AMXINT8"
    capsys.readouterr()
    assert kt("m2") == 1
    assert capsys.readouterr().err == "kt quant: MiniMax-M2 is not here: kt model download MiniMax-M2\n"


def test_a_terminal_gets_a_bar_with_the_time_left(model):
    leader, follower = pty.openpty()
    code = f"from kt_kernel.cli.main import main; main(['quant', {str(model)!r}, '-m', 'int4g'])"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([sys.executable, "-c", code], stderr=follower, env=environment) as process:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while block := os.read(leader, 4096):
                shown += block
    os.close(leader)
    assert process.returncode == 0
    assert b"converting" in shown
    assert b"12/12 experts" in re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown)
    assert b"left:" in shown
    assert b"layer 4: " in shown


def test_the_script_takes_the_options_of_the_readmes_and_writes_the_same(model, tmp_path):
    assert kt(model, "-o", tmp_path / "ours", "-m", "int8", "--cpu-threads", 1) == 0
    compatible = ("--threadpool-count", 2, "--cpuinfer-threads", 60, "--no-merge-safetensor", "--gpu")
    done = script("--input-path", model, "--input-type", "bf16", "--output", tmp_path / "theirs",
                  "--quant-method", "int8", *compatible)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    for note in ("fit any number of sub-pools", "every layer is a file of its own", "no GPU is needed"):
        assert note in done.stderr
    if _core.topology().cpus < 60:
        assert "60 threads were asked for; this process may use" in done.stderr


def test_again_keeps_what_is_there(model, tmp_path, capsys):
    assert kt("--input-path", model, "-o", tmp_path / "out", "--quant-method", "int4g", "--scales", "largest") == 0
    assert manifest(tmp_path / "out")["scales"] == "largest"
    assert kt("--input-path", model, "-o", tmp_path / "out", "--quant-method", "int4g", "--scales", "largest") == 0
    assert "0 layers converted in" in capsys.readouterr().out.replace("\n", " ")
    assert kt(model, "-o", tmp_path / "out", "-m", "int8", "--overwrite", "--resume-layer", 2) == 0
    assert sorted(manifest(tmp_path / "out")["layers"]) == ["2", "4"]
    assert "1 are missing" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "MODEL: name the folder of the model, once"),
        (["m", "--input-path", "m"], "MODEL: name the folder of the model, once"),
        (["m", "-m", "int5"], "--quant-method: 'int5' is not one of int4, int8, int4g, moe_int4, moe_int8"),
        (["m", "-i", "fp7"], "--input-type: 'fp7' is not one of auto, bf16"),
        (["m", "--scales", "x"], "--scales: 'x' is not one of searched, largest"),
        (["m", "--cpu-threads", "0"], "--cpuinfer-threads"),
    ],
)
def test_wrong_usage_is_one_line(arguments, said, capsys):
    assert kt(*arguments) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1


def test_an_error_is_one_line_and_code_1(model, tmp_path, capsys):
    assert kt(tmp_path / "nowhere") == 1
    told = capsys.readouterr().err
    assert told.startswith(f"kt quant: {tmp_path / 'nowhere'} does not exist")
    assert len(told.splitlines()) == 1
    done = script("-i", model, "-o", model)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("convert_cpu_weights.py: ")
    assert "is the folder of the source" in done.stderr
    assert script("-i", model).returncode == 2
