"""`kt plan` as it is typed: what it prints, --json, exit codes."""

import importlib

import pytest
from cli_cases import run
from plan_cases import GB, FakeProbe, machine, write_config

from kt_kernel.machine import facts
from kt_kernel.machine import probe as probes


@pytest.fixture
def here(home, monkeypatch):
    """A machine whose probe takes no time; `made` are the arguments of its probes."""
    made = []

    def probe(found, threads, **options):
        made.append((threads, options["fresh"]))
        return FakeProbe(threads)

    importlib.import_module("kt_kernel.plan.plan")  # has Probe in its annotations
    monkeypatch.setattr(facts, "machine", lambda: machine(24 * GB))
    monkeypatch.setattr(probes, "Probe", probe)
    return made


def test_a_folder(capfd, here, tmp_path):
    said = run(capfd, "plan", write_config(tmp_path / "mine"))
    assert said.code == 0
    assert said.out.startswith("mine: 48 layers, 128 experts of which a token takes 8, bf16 files\n")
    assert "INT4G (the first that fits into 24 GB)" in said.out
    assert "16 (one for each physical core that this process may use)" in said.out
    assert "decode:" in said.out
    assert said.err == ""
    assert here == [(16, False)]


def test_a_known_name_before_its_download(capfd, here):
    said = run(capfd, "plan", "qwen3-30b", "--context", "1000", "--fresh", "--json").json()
    assert (said["model"]["name"], said["model"]["folder"]) == ("Qwen3-30B-A3B", None)
    assert said["choices"]["context"] == {"value": 1000, "reason": "asked for"}
    assert [need["what"] for need in said["needs"]] == ["memory", "disk"]
    assert {other["method"] for other in said["alternatives"]} == {"BF16", "AMXINT8"}
    assert here == [(16, True)]


def test_what_does_not_fit_is_exit_code_1_with_the_ways_out(capfd, here, tmp_path):
    said = run(capfd, "plan", write_config(tmp_path / "mine"), "--method", "BF16")
    assert said.code == 1
    assert "it does not fit" in said.out
    assert "  * it fits with --method INT4G, at " in said.out


def test_busy_machines_are_pointed_out(capfd, here, tmp_path, monkeypatch):
    busy = FakeProbe()
    busy.busy = 0.5
    monkeypatch.setattr(probes, "Probe", lambda *_, **__: busy)
    said = run(capfd, "plan", write_config(tmp_path / "mine"))
    line = "kt plan: others used 50 % of the CPUs while this was measured; 'kt plan --fresh' measures again"
    assert said.err == f"{line}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing"], 1, "no model is called 'nothing'"),
        (["org/unknown"], 1, "'kt model download org/unknown'"),
        (["/nowhere"], 1, "does not exist"),
        (["demo", "--engine", "vllm"], 2, "'vllm' is not one of embedded, sglang"),
        (["demo", "--threads", "0"], 2, "--threads"),
        (["qwen3-30b", "--method", "INT3"], 1, "INT3"),
        (["qwen3-30b", "--engine", "sglang"], 1, "SGLang"),
        (["qwen3-30b", "--gpu-experts", "8"], 2, "--gpu-experts: this would run on the embedded engine"),
        ([], 2, "Missing argument 'model'"),
    ],
)
def test_errors_are_one_line(capfd, here, arguments, code, words):
    said = run(capfd, "plan", *arguments)
    assert said.code == code
    assert words in said.line()
    assert said.line().startswith("kt plan: ")
