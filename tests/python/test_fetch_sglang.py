"""tools/fetch_sglang.py: what it keeps of a wheel, and that a machine without a network is no error."""

import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools/fetch_sglang.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("fetch_sglang", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_tests_read_is_kept_and_fetched_once(tool, tmp_path, monkeypatch):
    asked = []

    def download(command, **_):
        asked.append(command[-1])
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "some.whl", "w") as wheel:
            for name in tool.FILES:
                wheel.writestr(name, f"# {command[-1]}")
            wheel.writestr("sglang/other.py", "")

    monkeypatch.setattr(subprocess, "run", download)
    assert tool.main(tmp_path) == 0
    assert tool.main(tmp_path) == 0
    assert asked == list(tool.RELEASES)
    kept = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    names = ("kt_ep_wrapper.py", "expert_distribution.py")
    assert kept == {f"{r.replace('==', '-')}/{name}": f"# {r}" for r in tool.RELEASES for name in names}
    (tmp_path / "sglang-0.5.23/expert_distribution.py").unlink()
    assert tool.main(tmp_path) == 0
    assert asked[len(tool.RELEASES) :] == ["sglang==0.5.23"]


def test_without_a_network_it_says_so(tool, tmp_path, monkeypatch, capsys):
    def refuse(command, **_):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", refuse)
    assert tool.main(tmp_path) == 1
    assert capsys.readouterr().out.count("will be skipped") == len(tool.RELEASES)
    assert list(tmp_path.rglob("*.py")) == []


def test_the_tests_read_what_it_fetches(tool):
    sglang_file = pytest.importorskip("sglang_file", reason="torch is not installed", exc_type=ImportError)
    fetched = [release.replace("==", "-") for release in tool.RELEASES]
    assert fetched == [*sglang_file.STOCK, sglang_file.FORK]
