"""What checks are made of: lists of modules, versions of packages, and facts of this machine."""

import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctor_cases import write

from kt_kernel import _core, env, settings
from kt_kernel.doctor import cpu, dimms, facts, measure, packages, surroundings

ROOT = Path(__file__).parents[2]

DMIDECODE = """# dmidecode 3.3
Getting SMBIOS data from sysfs.

Handle 0x0025, DMI type 17, 92 bytes
Memory Device
	Size: 32 GB
	Locator: {a}
	Bank Locator: {b}
	Type: DDR5
	Speed: 4800 MT/s
	Configured Memory Speed: 4400 MT/s

Handle 0x0026, DMI type 17, 92 bytes
Memory Device
	Size: No Module Installed
	Locator: {c}
	Bank Locator: {d}
	Type: Unknown
"""


@pytest.mark.parametrize(
    ("names", "channels"),
    [
        (("DIMM_A1", "P0 CHANNEL A", "DIMM_B1", "P0 CHANNEL B"), ("0/A", "0/B")),
        (("CPU1_DIMM_C1", "NODE 1", "CPU1_DIMM_C2", "NODE 1"), ("1/C", "1/C")),
        (("P0_Node0_Channel0_Dimm0", "", "P1_Node1_Channel3_Dimm0", ""), ("0/0", "1/3")),
        (("ChannelA-DIMM0", "BANK 0", "ChannelB-DIMM0", "BANK 1"), ("0/A", "0/B")),
        (("first", "", "second", ""), ("slot 0", "slot 1")),
    ],
)
def test_dmidecode(names, channels):
    found = dimms.parse_dmidecode(DMIDECODE.format(**dict(zip("abcd", names, strict=True))))
    assert [dimm.channel for dimm in found] == list(channels)
    assert found[0] == dimms.Dimm(channels[0], 32 << 30, "DDR5", 4400, 4800)
    assert found[1].bytes == 0
    assert dimms.peak_gbps(found) == 35.2


@pytest.mark.parametrize("text", ["", "/dev/mem: Permission denied", "Memory Device\n\tSize: 4 GB\n", "\n\n\n"])
def test_dmidecode_that_tells_nothing(text):
    assert dimms.parse_dmidecode(text) == ()


def test_edac(tmp_path):
    for number in range(3):
        where = f"/sys/devices/system/edac/mc/mc0/dimm{number}"
        text = {"size": "16384", "dimm_location": f"channel {number // 2} slot {number % 2}", "dimm_mem_type": "R-DDR4"}
        write(tmp_path, {f"{where}/{name}": value for name, value in text.items()})
    found = dimms.read_edac(tmp_path)
    assert [dimm.channel for dimm in found] == ["mc0/0", "mc0/0", "mc0/1"]
    assert found[0] == dimms.Dimm("mc0/0", 16 << 30, "DDR4")
    assert dimms.peak_gbps(found) is None
    assert dimms.peak_gbps(()) is None


def test_the_slowest_module_of_a_channel_counts():
    found = (dimms.Dimm("A", 1, "DDR4", 3200), dimms.Dimm("A", 1, "DDR4", 2666), dimms.Dimm("B", 1, "DDR4", 3200))
    assert dimms.peak_gbps(found) == pytest.approx((2666 + 3200) * 8 / 1000)


def test_versions_are_those_of_the_repository():
    project = (ROOT / "pyproject.toml").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for package in packages.PACKAGES:
        asked = re.search(rf'"{package.name.replace("_", "[-_]")}>=([\d.]+)(?:,<([\d.]+))?"', project)
        if asked:
            assert (package.least, package.below) == (asked.group(1), asked.group(2) or "")
        if package.name.replace("_", "-") in pinned:
            assert package.tested == pinned[package.name.replace("_", "-")]


@pytest.mark.parametrize(
    ("left", "right"), [("2.4", "2.13.0"), ("5.21rc1", "5.22"), ("0.5.9", "0.5.11"), ("1", "1.0.1"), ("x", "1")]
)
def test_order_of_versions(left, right):
    assert packages.order(left) < packages.order(right)
    assert packages.order("2.13.0+cpu") == packages.order("2.13")


def test_pins():
    requires = ["torch==2.11.0", "transformers == 5.12.1", "uvicorn==1", "numpy>=1", "torch==9; extra == 'old'"]
    assert packages.pins_of(requires) == {"torch": "2.11.0", "transformers": "5.12.1"}


def test_what_torch_and_sglang_say_of_themselves(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torch", "sglang"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # find_spec asks what is imported first
    write(tmp_path, {"torch/__init__.py": "", "torch/version.py": "cuda: Optional[str] = '13.0'\nhip = None\n"})
    write(tmp_path, {"sglang/__init__.py": "", "sglang/srt/server_args.py": "kt_weight_path: str"})
    assert packages.torch_cuda() == "13.0"
    assert packages.sglang_takes_kt() is True
    write(tmp_path, {"torch/version.py": "cuda: Optional[str] = None\n", "sglang/srt/server_args.py": "tp_size: int"})
    assert packages.torch_cuda() is None
    assert packages.sglang_takes_kt() is False


@pytest.mark.parametrize(
    ("host", "no_proxy", "spared"),
    [
        ("localhost", "", False),
        ("localhost", "example.com", False),
        ("localhost", "example.com, localhost", True),
        ("127.0.0.1", "127.0.0.0/8", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "10.0.0.0/8,*", True),
        ("a.example.com", ".example.com", True),
        ("localhost", "*.local", False),
    ],
)
def test_no_proxy(host, no_proxy, spared):
    assert surroundings.is_spared(host, no_proxy) is spared


def test_lists_of_cpus():
    assert [cpu.count_list(text) for text in ("", "0", "0-3", "0-3,8,10-11")] == [0, 1, 4, 7]


class TestThisMachine:
    def test_facts(self, home, monkeypatch):
        monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
        monkeypatch.setenv("NO_PROXY", "localhost")
        settings.set("inference.cpu_threads", "3")
        settings.set("paths.models", str(home / "not" / "there"))
        found = facts.gather()
        assert found.machine.cpus == _core.topology().cpus
        assert found.best_variant == _core.choose_variant()
        assert found.cpu_threads == 3
        assert found.proxies["HTTP_PROXY"] == "http://proxy:3128"
        assert env.no_proxy()
        assert list(found.disks) == [str(home / "not" / "there")]
        assert found.installed["torch"].version
        assert found.read("/proc/self/comm")
        assert found.read("/proc/not/there") == ""

    def test_broken_settings_are_a_fact(self, home):
        settings.path().parent.mkdir(parents=True)
        settings.path().write_text("[")
        found = facts.gather()
        assert str(settings.path()) in found.settings_error
        assert found.port == settings.SETTINGS["server.port"].default

    def test_a_port_that_is_taken(self, home):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            settings.set("server.port", str(taken.getsockname()[1]))
            assert facts.gather().port_error == "Address already in use"
        assert facts.gather().port_error == ""

    def test_asking_for_a_place_of_memory_gives_an_errno(self):
        number = facts.mbind_errno()
        assert number >= 0
        assert facts.error_name(1).startswith("EPERM (")

    def test_every_node_reads_its_own_and_the_others(self, monkeypatch):
        cpu_of = sorted(os.sched_getaffinity(0))[0]
        nodes = [SimpleNamespace(id=n, memory_id=0, cpus=[cpu_of], physical_cores=1) for n in (0, 1)]
        monkeypatch.setattr(_core, "topology", lambda: SimpleNamespace(nodes=nodes))
        found = measure.DoctorSide().rates(0.01, 0.01)
        assert set(found["local"]) == {0, 1}
        assert [(cores, memory) for cores, memory, _ in found["remote"]] == [(0, 1), (1, 0)]
        assert all(rate > 0 for _, _, rate in found["remote"])

    def test_bandwidth(self, monkeypatch):
        monkeypatch.setattr(measure, "_SECONDS", 0.02)
        monkeypatch.setattr(measure, "_LEAST_BYTES", 1 << 20)
        monkeypatch.setattr(measure.system, "l3_bytes", lambda: 0)
        rates = measure.measure()
        assert rates.read > 0
        assert 0 <= rates.busy_share <= 1
        assert len(rates.local) == (len(_core.topology().nodes) if len(_core.topology().nodes) > 1 else 0)
