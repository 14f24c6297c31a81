"""`kt verify` through its entry point."""

import json
import os
import re

import pytest

import kt_kernel
from kt_kernel.bench import client
from kt_kernel.bench.errors import SideError
from kt_kernel.cli.main import main
from kt_kernel.verify import run


def kt(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["verify", *arguments])
    return end.value.code


class Watcher:
    def __init__(self):
        self.said: list[str] = []
        self.points = 0

    def say(self, text: str) -> None:
        self.said.append(text)

    def done(self) -> None:
        self.points += 1


def test_a_quick_run_of_some_formats(capsys):
    assert kt("--quick", "--formats", "bf16,q8_0") == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == "Relative error of layers against fp64"
    assert lines[1].split() == ["Format", kt_kernel.__cpu_variant__]
    assert [line.split()[0] for line in lines[2:4]] == ["bf16", "q8_0"]
    assert lines[4] == "Slices for 1, 2, 4 GPUs, byte by byte: bf16"
    assert lines[-1].startswith("Right: 6 calls of kernels in ")
    assert said.err == ""
    assert "\x1b" not in said.out


def test_json_is_one_object_alone(capsys):
    assert kt("--quick", "--formats", "int4", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert (report["layer"], report["model"]) == (None, None)
    (row,) = report["kernels"]
    assert row["format"] == "int4"
    assert row["loss"] > row["relative_error"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--formats", "int5"], "'int5' is not one of bf16"),
        (["--variant", "sse"], "'sse' is not one of"),
        (["--method", "INT5"], "'INT5' is not one of auto, BF16"),
        (["--tokens", "1"], "--tokens"),
    ],
)
def test_wrong_usage(arguments, said, capsys):
    assert kt(*arguments) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys, home):
    assert kt("qwen3-30b") == 1
    assert "is not on this machine: 'kt model download " in capsys.readouterr().err
    assert kt("./nowhere") == 1
    assert "'./nowhere' does not exist" in capsys.readouterr().err


WRONG = {"format": "int8", "variant": "avx2", "failures": ["T=1: far off"], "relative_error": 1.0, "calls": 1}


def test_what_is_wrong_is_said_and_ends_with_1(capsys, monkeypatch):
    monkeypatch.setattr(run, "_verify_kernels", lambda request, watcher: [WRONG])
    assert kt("--quick", "--formats", "int8") == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[2].split() == ["int8", "FAILED"]
    assert said.out.splitlines()[-1].startswith("NOT PROVEN RIGHT: ")
    assert said.err == "kt verify: int8 avx2: T=1: far off\n"


LAYER = {
    "layer": 3,
    "method": "INT4G",
    "format": "int4g",
    "experts": [0, 1],
    "relative_error": 0.1,
    "limit": 0.2,
    "failures": [],
}
MODEL = {
    "tokens": 9,
    "divergence": 0.25,
    "limit": 0.6,
    "perplexity": 20.0,
    "reference_perplexity": 18.0,
    "same_token": 0.5,
    "failures": [],
}


CONFIG = {
    "model_type": "qwen3_moe",
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
}


def test_a_model_is_shown(capsys, monkeypatch, tmp_path):
    asked = {}

    def answer(call, **arguments):
        asked[call] = arguments
        return {"layer": LAYER, "model": MODEL}[call]

    monkeypatch.setattr(run, "_verify_kernels", lambda request, watcher: [])
    monkeypatch.setattr(run, "_verify_slices", lambda request: [])
    monkeypatch.setattr(run, "_asked", answer)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert kt(str(tmp_path), "--method", "INT4G", "--layer", "3", "--quick", "--threads", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Layer 3, INT4G (int4g), 2 experts, against torch: 0.1000 (limit 0.2000)"
    assert lines[1] == (
        "Whole model, 9 tokens: divergence 0.25 from bf16 (limit 0.6), perplexity 20 beside 18, 50.0% same tokens"
    )
    assert asked["layer"] == {"path": str(tmp_path), "layer_idx": 3, "method": "INT4G", "threads": 1}
    assert asked["model"]["tokens"] == run.QUICK_TOKENS
    monkeypatch.setitem(MODEL, "failures", ["too far"])
    assert kt(str(tmp_path)) == 1
    assert capsys.readouterr().err == "kt verify: too far\n"
    monkeypatch.setattr(run, "_asked", lambda call, **_: LAYER if call == "layer" else {"skipped": "no memory"})
    assert kt(str(tmp_path)) == 0
    assert "Whole model: not measured (no memory)" in capsys.readouterr().out


def test_a_folder_that_is_no_model_is_refused_before_anything_runs(capsys, tmp_path):
    assert kt(str(tmp_path)) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"kt verify: .*config\.json does not exist; .*\n", said.err)


def test_an_error_of_a_comparison_is_its_failure():
    (failure,) = run._asked("layer", path="/nowhere", layer_idx=None, method="auto", threads=None)["failures"]
    assert failure.startswith("FileNotFoundError: /nowhere")


class Dying:
    """Stands in for a client whose process a kernel kills: that of avx2."""

    made = 0

    def __init__(self):
        Dying.made += 1

    def call(self, call, weight_format, variants, quick):
        if "avx2" in variants:
            raise SideError("the process measuring 'verify' ended by SIGILL")
        return [{"format": weight_format, "variant": variant, "failures": []} for variant in variants]

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def test_a_kernel_that_kills_its_process_is_named_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(run, "_client", Dying)
    watcher = Watcher()
    monkeypatch.setattr(run, "_verify_slices", lambda request: [])
    request = run.Request(formats=("bf16", "int8"), variants=("avx512_base", "avx2"))
    report = run.verify(request, watcher)
    assert not report["ok"]
    died = "the process measuring 'verify' ended by SIGILL"
    assert [(row["format"], row["variant"], row["failures"]) for row in report["kernels"]] == [
        (name, variant, [died] if variant == "avx2" else [])
        for name in ("bf16", "int8")
        for variant in ("avx512_base", "avx2")
    ]
    assert watcher.said == ["bf16", "int8"]
    assert watcher.points == request.points == 2


def test_slices_that_are_wrong_are_said(capsys, monkeypatch):
    wrong = {"format": "rawint4", "ranks": [1, 2, 4], "failures": ["slices from 2 sub-pools: w2_scale of rank 1 of 4"]}
    monkeypatch.setattr(run, "_verify_kernels", lambda request, watcher: [])
    monkeypatch.setattr(run, "_verify_slices", lambda request: [wrong])
    assert kt("--quick") == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[0].endswith(": rawint4 FAILED")
    assert said.err == "kt verify: rawint4: slices from 2 sub-pools: w2_scale of rank 1 of 4\n"


def test_a_client_names_the_signal():
    with client.Client("verify") as side:
        os.kill(side._process.pid, 11)
        with pytest.raises(SideError, match="ended by SIGSEGV"):
            side.call("kernels", weight_format="bf16", variants=[], quick=True)
