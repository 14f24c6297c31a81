"""Writing to the store: whole files or none, and a load that goes on where nothing can be written."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from store_cases import StoreCase
from weight_files import decoded, same

from kt_kernel.weights import store, whole_file

# A child that loads the checkpoint of a StoreCase into its store, after `BEFORE`.
CHILD = """
import os, signal, sys, time, warnings
sys.path.insert(0, {tests!r})
from weight_files import METHODS, make_layer
from store_cases import LAYER, SHAPE
from kt_kernel.weights import load_layer, store
{before}
layer = make_layer(SHAPE, "int8")
load_layer(layer, "AMXINT8", {model!r}, LAYER, store={store!r})
print("loaded", layer.loaded_experts, flush=True)
"""


@pytest.fixture
def case(tmp_path):
    return StoreCase(tmp_path, "int8")


def child(case, before: str = "") -> "subprocess.Popen[str]":
    code = CHILD.format(tests=str(Path(__file__).parent), before=before, model=str(case.model), store=str(case.store))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_loaded_without(case, match: str) -> None:
    with pytest.warns(RuntimeWarning, match=match) as caught:
        layer = case.load()
    assert same(decoded(layer), case.fresh)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith(f"weight store: {case.store}: cannot write packed weights: ")
    assert text.endswith(". The next start has to pack again")


@pytest.mark.parametrize("where", ["posix_fallocate", "pwrite", "fsync", "rename"])
def test_a_full_disk_is_a_warning(where, case, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, where, full)
    assert_loaded_without(case, r"No space left on device; it needs .* GB; free some space or choose another")
    assert case.names() == []


def test_a_disk_that_fills_up_while_experts_are_written(case):
    """The file system cannot reserve, so that the native writes meet the limit."""
    before = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
def refuse(*_): raise OSError(95, "Operation not supported")
os.posix_fallocate = refuse
"""
    with child(case, before) as process:
        out, err = process.communicate()
    assert out == "loaded 4\n", err
    assert "RuntimeWarning: weight store: " in err
    assert f"cannot write {case.file}: File too large. The next start has to pack again" in err
    assert case.names() == []


def test_a_limit_on_the_size_of_files(case):
    with child(case, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))") as process:
        out, err = process.communicate()
    assert out == "loaded 4\n", err
    assert "cannot write packed weights: File too large; it needs 0.0024 GB; raise 'ulimit -f'" in err
    assert case.names() == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_to(code, case, monkeypatch):
    case.store.mkdir()
    opened = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)  # tests may run as root, whom no mode stops
    assert_loaded_without(case, f"{os.strerror(code)}; choose a folder that you may write to")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(case):
    case.store.mkdir(mode=0o500)
    assert_loaded_without(case, "Permission denied; choose a folder that you may write to")


def test_a_file_in_the_place_of_the_folder(case):
    case.store.write_text("mine")
    assert_loaded_without(case, "File exists; choose a folder, this is none")
    assert case.store.read_text() == "mine"


def test_layers_that_meet_the_same_obstacle_warn_once(case):
    case.store.write_text("")
    arguments = f"'AMXINT8', {str(case.model)!r}, LAYER, store={str(case.store)!r}"
    with child(case, f"load_layer(make_layer(SHAPE, 'int8'), {arguments})") as process:
        _, err = process.communicate()
    assert err.count("cannot write packed weights") == 1


KILL = "os.{where} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("where", ["pwrite", "fsync", "rename"])
def test_a_killed_writer_leaves_nothing_that_is_used_or_stays(where, case):
    """pwrite: the experts are there, their header is not."""
    with child(case, KILL.format(where=where)) as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert case.names() == [case.file.name + ".tmp"]
    case.load()
    assert case.names() == [case.file.name]
    case.spoil()
    assert case.is_from_store(case.load())


def test_a_writer_killed_while_it_replaces_leaves_the_old_file(case):
    case.load()
    before = case.file.read_bytes()
    os.utime(case.source)
    with child(case, KILL.format(where="rename")) as process:
        process.communicate()
    assert case.file.read_bytes() == before
    case.assert_made_again()
    assert case.names() == [case.file.name]


def test_what_another_model_left_is_removed_too(case):
    case.store.mkdir()
    leftover = case.store / "gone.layer-00000.bf16.ktpack.tmp"
    leftover.write_bytes(b"half")
    (case.store / "mine.tmp").write_bytes(b"")
    case.load()
    assert case.names() == sorted([case.file.name, "mine.tmp"])


def test_a_writer_at_work_is_not_disturbed_nor_waited_for(case):
    with child(case, "os.fsync = lambda fd: (print('open', flush=True), time.sleep(600))") as process:
        assert process.stdout.readline() == "open\n"
        names = case.names()
        layer = case.load()  # no warning: the other one keeps the same
        assert same(decoded(layer), case.fresh)
        assert case.names() == names == [case.file.name + ".tmp"]
        process.kill()
    case.load()
    assert case.names() == [case.file.name]


def test_many_processes_at_once(case):
    processes = [child(case) for _ in range(4)]
    for process in processes:
        out, err = process.communicate()
        assert (out, err) == ("loaded 4\n", "")
    assert case.names() == [case.file.name]
    case.spoil()
    assert case.is_from_store(case.load())


def test_many_threads_at_once(case):
    failures = []

    def run() -> None:
        for _ in range(5):
            if not same(decoded(case.load()), case.fresh):
                failures.append("other weights")
            case.file.unlink(missing_ok=True)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [name for name in case.names() if name.endswith(".tmp")] == []


def test_a_file_replaced_while_it_is_read_is_read_to_its_end(case, monkeypatch):
    case.load()
    case.spoil()
    monkeypatch.setattr(store, "_BATCH", 1)
    other = case.store / "other"

    def replace(*_):
        other.write_bytes(b"not weights")
        other.rename(case.file)

    assert case.is_from_store(case.load(progress=replace))


def test_the_leftover_of_another_user_is_left_alone(case, monkeypatch):
    case.store.mkdir()
    leftover = case.store / "theirs.ktpack.tmp"
    leftover.write_bytes(b"")
    opened = os.open

    def refuse(path, flags, *rest):
        if path == leftover:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *rest)

    monkeypatch.setattr(whole_file.os, "open", refuse)
    case.load()
    assert case.names() == sorted([case.file.name, leftover.name])
