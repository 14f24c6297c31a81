"""`kt model download` against a server that speaks as the hub does."""

import os
import subprocess
import sys
import time

import pytest
from cli_cases import KT, run
from convert_cases import write_model
from fake_hub import COMMIT, FakeHub

from kt_kernel import folders, settings
from kt_kernel.registry import user_models
from kt_kernel.registry.find import find

huggingface_hub = pytest.importorskip(
    "huggingface_hub", reason="huggingface_hub is not installed: no download was tested"
)

REPO = "MiniMaxAI/MiniMax-M2"


@pytest.fixture
def files(tmp_path) -> dict[str, bytes]:
    folder = write_model(tmp_path / "original")
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())} | {
        "README.md": b"about it",
        "pytorch_model.bin": b"x" * 5000,
        "original/consolidated.pth": b"x" * 5000,
    }


@pytest.fixture
def hub(files, home, monkeypatch):
    for name in ("HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with FakeHub({REPO: files}) as hub:
        settings.set("download.mirror", hub.address)
        yield hub


@pytest.fixture
def kt(hub, capfd):
    return lambda *arguments: run(capfd, "model", *arguments)


@pytest.fixture
def folder(hub):
    return folders.data_folder() / "models" / "MiniMax-M2"


def test_a_known_model_is_downloaded_checked_and_named(kt, hub, files, folder):
    said = kt("download", "m2")
    assert said.code == 0, said.err
    assert said.out == f"MiniMax-M2 is in {folder}\n"
    assert f"MiniMaxAI/MiniMax-M2: 5 files, 0.0 GB, of which 0.0 GB are missing, into {folder}" in said.err
    expected = {
        name: data for name, data in files.items() if name not in ("pytorch_model.bin", "original/consolidated.pth")
    }
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == expected
    assert find("m2").path == folder
    assert user_models.get("MiniMax-M2").repo_id == REPO
    assert "5 of 5 files by checksum" in kt("verify", "m2").out
    hub.served.clear()
    said = kt("download", REPO, "--json").json()
    assert said == {
        "name": "MiniMax-M2",
        "path": str(folder),
        "repo": REPO,
        "revision": COMMIT,
        "files": 5,
        "bytes": sum(map(len, expected.values())),
    }
    assert hub.served == []


def test_the_same_command_goes_on_with_what_is_missing(kt, hub, files, folder):
    broken = "model-4.safetensors"
    hub.broken[broken] = "error"
    said = kt("download", "m2")
    assert said.code == 1
    assert "run the same command again" in said.err.splitlines()[-1]
    assert user_models.user_models() == []
    assert not (folder / broken).exists()
    assert not list(folder.rglob("*.incomplete"))
    del hub.broken[broken]
    hub.served.clear()
    assert kt("download", "m2").code == 0
    assert broken in {name for name, _ in hub.served}
    assert len(hub.served) < len(files) - 2
    assert (folder / broken).read_bytes() == files[broken]


def test_a_file_that_was_cut_short_is_fetched_again(kt, hub, files, folder):
    assert kt("download", "m2").code == 0
    for name in ("model-1.safetensors", "config.json"):
        file = folder / name
        when = file.stat().st_mtime_ns
        file.write_bytes(files[name][:-1])
        os.utime(file, ns=(when, when))
    assert kt("verify", "m2", "--quick").code == 1
    assert kt("download", "m2").code == kt("verify", "m2").code == 0


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "a/../../outside.safetensors"])
def test_no_file_goes_out_of_its_folder(kt, hub, folder, name):
    hub.repos["org/bad"] = {name: b"x" * 2000}
    assert "outside of its folder" in kt("download", "org/bad").line()
    assert not list(folder.parent.parent.rglob("outside*"))


@pytest.fixture
def small_pieces(monkeypatch):
    """Files of this size count as large ones, and come in pieces."""
    from huggingface_hub import constants

    from kt_kernel.registry import download

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(download, "LARGE_BYTES", 1000)


def test_a_connection_that_breaks_is_taken_up_in_the_middle(kt, hub, files, folder, small_pieces):
    cut = "model-2.safetensors"
    hub.broken[cut] = ["cut"]
    assert kt("download", "m2", "--dir", folder, "--name", "mine").code == 0
    first, second = [begin for name, begin in hub.served if name == cut]
    assert (first, 0 < second <= len(files[cut]) // 2) == (0, True)
    assert (folder / cut).read_bytes() == files[cut]
    assert user_models.get("mine").path == str(folder)


def test_a_large_file_goes_on_where_another_run_stopped(kt, hub, files, folder, small_pieces):
    cut = "model-2.safetensors"
    hub.broken[cut] = ["cut", "error"]
    said = kt("download", "m2")
    assert said.code == 1
    assert "run the same command again" in said.err
    assert not (folder / cut).exists()
    (part,) = folder.rglob("*.part")
    there = part.stat().st_size
    assert 0 < there <= len(files[cut]) // 2
    hub.served.clear()
    assert kt("download", "m2").code == 0
    assert [begin for name, begin in hub.served if name == cut] == [there]
    assert (folder / cut).read_bytes() == files[cut]
    assert "5 of 5 files by checksum" in kt("verify", "m2").out
    assert not list(folder.rglob("*.part"))


def test_what_is_left_of_another_version_of_a_file_is_not_used(kt, hub, files, folder, small_pieces):
    old = folder / ".cache/huggingface/download" / "model-2.safetensors.0000.part"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"something else")
    assert kt("download", "m2").code == 0
    assert (folder / "model-2.safetensors").read_bytes() == files["model-2.safetensors"]
    assert not old.exists()


def test_what_came_damaged_is_named_and_the_model_is_not_added(kt, hub, folder):
    hub.broken["model-1.safetensors"] = "damaged"
    said = kt("download", "m2")
    assert said.code == 1
    assert "model-1.safetensors: has another checksum than the hub says" in said.err
    assert user_models.user_models() == []
    assert not (folder / "model-1.safetensors").exists()
    assert kt("download", "m2", "--no-verify").code == 0
    assert "model-1.safetensors: wrong: has another checksum" in kt("verify", "m2").out
    del hub.broken["model-1.safetensors"]
    (folder / "model-1.safetensors").unlink()
    assert kt("download", "m2").code == kt("verify", "m2").code == 0


@pytest.mark.parametrize(
    ("repo", "refused", "message"),
    [
        ("org/none", None, "has no model 'org/none', or it is private"),
        ("org/gated", (403, "GatedRepo"), "asks for its licence to be accepted: do so on"),
        ("org/down", (503, ""), "could not get org/down from"),
    ],
)
def test_what_the_hub_refuses_is_one_line(kt, hub, repo, refused, message):
    if refused:
        hub.refused[repo] = refused
    said = kt("download", repo)
    assert said.code == 1
    assert message in said.line()
    assert said.line().startswith("kt model download: ")


def test_what_cannot_be_downloaded(kt, hub, home, folder):
    assert "has no revision 'v2'" in kt("download", "m2", "--revision", "v2").line()
    assert "'demo' is no model of the hub" in kt("download", "demo").line()
    hub.repos["org/empty"] = {"README.md": b"nothing"}
    assert "org/empty has no *.safetensors or *.gguf" in kt("download", "org/empty").line()
    (home / "full").mkdir()
    (home / "full" / "letters").write_text("mine")
    assert "holds files that no download left there" in kt("download", "m2", "--dir", home / "full").line()
    settings.set("download.mirror", "http://127.0.0.1:9")
    assert "could not get MiniMaxAI/MiniMax-M2 from http://127.0.0.1:9" in kt("download", "m2").line()
    assert not folder.exists()


def test_one_of_several_gguf_models_has_to_be_chosen(kt, hub, home):
    names = ["X-Q4_K_M.gguf", "X-Q8_0-00001-of-00002.gguf", "X-Q8_0-00002-of-00002.gguf"]
    hub.repos["org/X-GGUF"] = {"config.json": b"{}", **dict.fromkeys(names, b"GGUF" + b"x" * 2000)}
    said = kt("download", "org/X-GGUF")
    assert "has several GGUF models (X-Q4_K_M.gguf, X-Q8_0.gguf): choose with --include" in said.line()
    said = kt("download", "org/X-GGUF", "--include", "*Q4_K_M*")
    # These are no GGUF files inside, which is noticed.
    assert "X-Q4_K_M.gguf" in said.err
    found = folders.data_folder() / "models" / "X-GGUF"
    assert {file.name for file in found.iterdir() if file.is_file()} == {"config.json", "X-Q4_K_M.gguf"}


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(kt, hub, folder, monkeypatch):
    from kt_kernel.registry import download

    monkeypatch.setattr(download, "_SPARE", 1 << 60)
    assert "GB more in" in kt("download", "m2").line()
    assert hub.served == []
    assert not folder.exists()


def test_a_file_that_plain_http_does_not_give_is_told(kt, monkeypatch):
    from huggingface_hub import constants

    from kt_kernel.registry import resumable

    monkeypatch.setattr(resumable, "_MOST_BYTES", 1000)
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 1000)
    last = kt("download", "m2").err.splitlines()[-1]
    assert last.startswith(
        "kt model download: huggingface_hub cannot download MiniMaxAI/MiniMax-M2: The file is too large"
    )


def test_without_the_package_the_message_tells_how_to_get_it(kt, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in kt("download", "m2").line()


def test_one_download_at_a_time_and_leftovers_of_killed_ones_go(kt, hub, folder):
    from kt_kernel.registry.download import _locked

    with _locked(folder):
        assert "another process downloads into" in kt("download", "m2").err
    leftover = folder / ".cache" / "huggingface" / "download" / "x.incomplete"
    leftover.parent.mkdir(parents=True, exist_ok=True)
    leftover.write_bytes(b"half")
    assert kt("download", "m2").code == 0
    assert not leftover.exists()


def test_control_c_says_how_to_go_on(hub, folder):
    """A real process, interrupted while the server keeps it waiting."""
    hub.repos[REPO]["model-1.safetensors"] = Slow(hub.repos[REPO]["model-1.safetensors"])
    with subprocess.Popen([*KT, "model", "download", "m2"], stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while not hub.served and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(2)
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert "interrupted; the same command goes on with what is missing" in said
    assert user_models.user_models() == []


class Slow(bytes):
    """Bytes that take a second for each look at them."""

    def __getitem__(self, key):
        time.sleep(1)
        return super().__getitem__(key)
