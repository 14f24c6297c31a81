"""`kt doctor` through its entry point."""

import json
import re
from dataclasses import replace

import pytest
from doctor_cases import facts_of

from kt_kernel.bench.errors import SideError
from kt_kernel.cli.main import main
from kt_kernel.doctor import facts, measure
from kt_kernel.doctor.facts import Rates


def kt(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *arguments])
    return end.value.code


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Facts instead of this machine; keys are what to change. `rates` is what was measured."""
    changes: dict = {}

    def gather(rates=None):
        changes["measured"] = rates
        given = {name: value for name, value in changes.items() if name not in ("measured", "files")}
        return replace(facts_of(tmp_path, changes.get("files"), **given), rates=rates)

    monkeypatch.setattr(facts, "gather", gather)
    monkeypatch.setattr(measure, "measure", lambda: Rates(130.0, 0.0))
    return changes


def test_this_machine_without_measuring(capsys, home):
    code = kt("--fast", "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is (code == 0)
    checks = [finding["check"] for finding in said["findings"]]
    assert {"python", "kt_kernel", "cpu", "instruction_set", "memory", "numa", "torch"} <= set(checks)
    assert "bandwidth" not in checks
    for finding in said["findings"]:
        assert finding["status"] in ("ok", "warning", "error")
        assert finding["value"]
        assert finding["status"] == "ok" or finding["cost"]


def test_all_is_well(capsys, made_up):
    assert kt() == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.splitlines()[0].split() == ["Check", "Status", "Value"]
    assert re.search(r"^Read bandwidth +ok +130\.0 GB/s, 85% of the channels' 154$", said.out, re.MULTILINE)
    assert said.out.splitlines()[-1].startswith("errors: 0, warnings: 0, ok: ")
    assert "amx: this CPU lacks" not in said.out
    assert "\x1b" not in said.out


def test_verbose_tells_more(capsys, made_up):
    assert kt("-v") == 0
    assert "amx: this CPU lacks amx_tile" in capsys.readouterr().out


def test_fast_measures_nothing(capsys, made_up):
    assert kt("--fast") == 0
    assert made_up["measured"] is None


def test_a_warning_says_what_it_costs_and_the_fix(capsys, made_up):
    made_up["files"] = {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}
    assert kt() == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("Huge pages (warning): transparent huge pages are off")
    assert lines[at + 1] == "  costs: about 8 % of the read bandwidth (measured on one core of Zen 3)"
    assert lines[at + 2] == "  fix: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    assert lines[-1].startswith("errors: 0, warnings: 1, ")


def test_an_error_ends_with_1(capsys, made_up):
    made_up["python"] = (3, 8)
    assert kt() == 1
    assert "Python (error): 3.8" in capsys.readouterr().out
    assert kt("--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_memory_that_cannot_be_measured_is_one_line(capsys, made_up, monkeypatch):
    def failing():
        raise SideError("the process measuring 'doctor' ended by SIGKILL")

    monkeypatch.setattr(measure, "measure", failing)
    assert kt() == 0
    assert capsys.readouterr().err == (
        "kt doctor: the memory could not be measured: the process measuring 'doctor' ended by SIGKILL\n"
    )


def test_wrong_usage(capsys):
    assert kt("--slow") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
