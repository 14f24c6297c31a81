"""What the machine is: files of other machines, tables of nvidia-smi, and this one."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

import kt_kernel
from kt_kernel import _core
from kt_kernel.machine import facts, gpus, system

GIB = 1 << 30
H200 = "0, GPU-aaaa1111, NVIDIA H200, 143771, 143000, 9.0, 570.1"
TWO = f"{H200}\n1, GPU-aaab2222, NVIDIA H200, 143771, 100, 9.0, 570.1\n"


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def root(tmp_path):
    """64 GiB, 48 of them available, no cgroup."""
    meminfo = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n"
    return write(tmp_path, **{"proc/meminfo": meminfo})


def test_memory_without_cgroups(root):
    assert system.memory_bytes(root) == 64 * GIB
    assert system.available_bytes(root) == 48 * GIB


def test_the_narrowest_group_counts_and_cold_file_pages_are_free(root):
    files = {
        "proc/self/cgroup": "0::/slice/box\n",
        "sys/fs/cgroup/slice/memory.max": str(16 * GIB),
        "sys/fs/cgroup/slice/memory.current": str(15 * GIB),
        "sys/fs/cgroup/slice/memory.stat": f"anon 1\ninactive_file {5 * GIB}\n",
        "sys/fs/cgroup/slice/box/memory.max": "max",
        "sys/fs/cgroup/slice/box/memory.current": str(GIB),
    }
    write(root, **files)
    assert system.memory_bytes(root) == 16 * GIB
    assert system.available_bytes(root) == 6 * GIB
    write(root, **{"sys/fs/cgroup/slice/box/memory.max": str(2 * GIB)})
    assert system.available_bytes(root) == 1 * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(root):
    files = {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": str(2 * GIB)}
    assert system.available_bytes(write(root, **files)) == 0


def test_version_1_of_cgroups(root):
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/x\n5:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(40 * GIB),
    }
    write(root, **files)
    assert (system.memory_bytes(root), system.available_bytes(root)) == (4 * GIB, GIB)


def test_node_memory_counts_what_the_file_cache_gives_back(tmp_path):
    text = (
        "Node 1 MemTotal:  1000 kB\nNode 1 MemFree: 10 kB\nNode 1 Active(file): 20 kB\nNode 1 Inactive(file): 30 kB\n"
    )
    write(tmp_path, **{"sys/devices/system/node/node1/meminfo": text})
    assert system.node_memory(1, tmp_path) == (1000 * 1024, 60 * 1024)
    assert system.node_memory(0, tmp_path) == (0, 0)


def test_huge_pages(tmp_path):
    write(tmp_path, **{"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"})
    assert system.huge_pages(tmp_path) == "madvise"
    assert system.huge_pages(tmp_path / "nowhere") == ""


def test_cpu_model_is_the_first_one():
    assert system.cpu_model("processor : 0\nmodel name\t: Some CPU \nmodel name\t: Other\n") == "Some CPU"


def test_busy_share_is_a_share():
    assert 0 <= system.busy_share(0.05) <= 1


def test_gpus_of_a_table():
    first, second = gpus.parse(TWO)
    assert (first.name, first.memory_bytes, first.compute_capability) == ("NVIDIA H200", 143771 << 20, "9.0")
    assert second.free_bytes == 100 << 20
    assert gpus.parse("0, GPU-1, Broken, [N/A], [N/A], 9.0, 570\nNo devices were found\n") == ()
    assert gpus.parse(H200.replace("9.0", "[N/A]"))[0].compute_capability == ""


@pytest.mark.parametrize(
    ("devices", "left"),
    [
        (None, [0, 1]),
        ("", []),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-aaab", [1]),
        ("GPU-aaa", []),  # could be either
        ("0,-1,1", [0]),
        ("0,0", [0]),
        ("7", []),
    ],
)
def test_visible_gpus(devices, left):
    assert [gpu.index for gpu in gpus.visible(gpus.parse(TWO), devices)] == left


@pytest.mark.parametrize(("script", "left"), [(f"echo '{H200}'", 1), (f"echo '{H200}'; exit 9", 0), ("kill $$", 0)])
def test_nvidia_smi_is_asked(tmp_path, monkeypatch, script, left):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert len(gpus.gpus()) == left


def test_this_machine():
    found = facts.machine()
    topology = _core.topology()
    assert (found.cpus, found.cores) == (topology.cpus, topology.physical_cores)
    assert 1 <= found.threads <= found.cores <= found.cpus
    assert found.siblings == found.cpus - found.cores
    assert found.variant == kt_kernel.__cpu_variant__
    assert 0 < found.available_bytes < found.memory_bytes
    assert all(node.memory_bytes >= node.free_bytes >= 0 for node in found.nodes)
    assert all(variant.reason for variant in found.refused)
    assert any(disk.mount == "/" for disk in found.disks)


@pytest.mark.parametrize(("quota", "threads"), [(0.0, 8), (3.7, 3), (0.5, 1), (64.0, 8)])
def test_threads_stay_inside_the_quota(quota, threads):
    node = facts.Node(0, 0, tuple(range(16)), 8, 1, 1)
    found = replace(facts.machine(), nodes=(node,), cpu_quota=quota)
    assert found.threads == threads


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path):
    disk = facts.disk_of(tmp_path / "a" / "b")
    assert tmp_path.is_relative_to(disk.mount)
    assert disk.total_bytes >= disk.free_bytes > 0
