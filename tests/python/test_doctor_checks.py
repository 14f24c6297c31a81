"""Every finding of ``kt doctor`` appears on a machine that has its cause, and is gone without it."""

import errno
from dataclasses import replace

import pytest
from doctor_cases import DIMMS, GIB, GPU, INSTALLED, TWO_NODES, facts_of, findings, meminfo, node

from kt_kernel import _core
from kt_kernel.doctor import cpu
from kt_kernel.doctor.dimms import Dimm
from kt_kernel.doctor.facts import Rates
from kt_kernel.doctor.finding import Status
from kt_kernel.doctor.packages import Installed
from kt_kernel.machine.facts import Disk

TWO_RATES = Rates(200.0, 0.0, {0: 100.0, 1: 100.0}, {(0, 1): 40.0, (1, 0): 50.0})
FREQUENCY = "/sys/devices/system/cpu/cpu{}/cpufreq/{}"


def governor(name: str, driver: str, preference: str = "", cpu: int = 0) -> dict[str, str]:
    files = {"scaling_governor": name, "scaling_driver": driver, "energy_performance_preference": preference}
    files |= {"scaling_cur_freq": "1200000", "cpuinfo_max_freq": "3600000"}
    return {FREQUENCY.format(cpu, file): text for file, text in files.items() if text}


def test_a_machine_in_order_has_nothing_but_ok(tmp_path):
    found = findings(facts_of(tmp_path))
    assert {finding.check: finding for finding in found.values() if finding.status is not Status.OK} == {}
    assert {"cpu", "instruction_set", "memory", "huge_pages", "bandwidth", "torch", "port"} <= found.keys()
    assert found["bandwidth"].value == "130.0 GB/s, 85% of the channels' 154"
    assert found["instruction_set"].details == ("amx: this CPU lacks amx_tile",)


def test_nothing_is_measured_with_fast(tmp_path):
    found = findings(facts_of(tmp_path, rates=None))
    assert not {"bandwidth", "cross_node", "load"} & found.keys()


# check -> (files, changes, what value, cost and fix must say)
CASES = {
    "python": ({}, {"python": (3, 9)}, "3.9", "3.10 or newer", "venv"),
    "environment": ({}, {"in_environment": False}, "the system", "versions", "python3 -m venv"),
    "instruction_set emulated": (
        {},
        {"variant": "emu", "emulated": True, "forced_variant": "emu"},
        "emulated",
        "100 times",
        "unset KT_KERNEL_CPU_VARIANT",
    ),
    "instruction_set forced": (
        {},
        {"variant": "avx2", "forced_variant": "avx2"},
        "avx2, although avx512_bf16 runs here",
        "64 operations on int8 a cycle, with avx512_bf16 256",
        "unset KT_KERNEL_CPU_VARIANT",
    ),
    "instruction_set denied": (
        {},
        {"best_variant": "amx", "in_container": True},
        "denied the registers of amx",
        "256 operations on int8 a cycle, with amx 2048",
        "seccomp=unconfined",
    ),
    "instruction_set avx2": ({}, {"variant": "avx2", "best_variant": "avx2"}, "no AVX-512", "with avx512_vnni 256", ""),
    "cpus affinity": (
        {"/sys/devices/system/cpu/online": "0-31"},
        {},
        "16 of 32: an affinity mask",
        "50%",
        "taskset -c 0-31",
    ),
    "cpus cpuset": (
        {
            "/sys/devices/system/cpu/online": "0-31",
            "/proc/self/cgroup": "0::/box",
            "/sys/fs/cgroup/box/cpuset.cpus.effective": "0-15",
        },
        {"in_container": True},
        "16 of 32: a cpuset",
        "50%",
        "docker update --cpuset-cpus 0-31",
    ),
    "quota": ({}, {"cpu_quota": 2.0}, "time of 2 CPUs for 8 cores", "75%", "CPUQuota=800%"),
    "threads": ({}, {"cpu_threads": 16}, "is 16, there are 8 cores", "wait", "kt config set inference.cpu_threads 8"),
    "governor": (governor("powersave", "acpi-cpufreq"), {}, "powersave on 1 of 1", "1.2 of 3.6 GHz", "cpupower"),
    "load": ({}, {"rates": Rates(130.0, 0.5)}, "50%", "slowest thread", "top"),
    "memory": ({}, {"memory_bytes": 16 * GIB}, "17.2 GB", "17 GB in 4 bits", "kt plan"),
    "memory_limit": (
        {"/sys/fs/cgroup/memory.max": str(16 * GIB), "/sys/fs/cgroup/memory.current": "0"},
        {"in_container": True},
        "allows 17.2 of 68.7 GB",
        "killed",
        "docker update --memory 64g",
    ),
    "swap": ({"/proc/meminfo": meminfo(64, 8, 3)}, {}, "3.2 of 8.6 GB", "0.1 ms", "swapoff"),
    "huge_pages": (
        {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
        {},
        "off",
        "8 %",
        "echo madvise",
    ),
    "reserved_pages": (
        {"/proc/meminfo": meminfo(rest="HugePages_Total: 4096\nHugePages_Free: 4096\nHugepagesize: 2048 kB\n")},
        {},
        "8.6 GB",
        "8.6 GB",
        "vm.nr_hugepages=0",
    ),
    "numa bare": (
        {},
        {"nodes": (node(0, range(8)), node(1, range(8, 16), memory=0)), "rates": None},
        "node 1 has CPUs and no memory",
        "another node",
        "NPS1",
    ),
    "numa balancing": (
        {"/proc/sys/kernel/numa_balancing": "1\n"},
        {"nodes": TWO_NODES, "rates": TWO_RATES},
        "moves pages",
        "page faults",
        "sysctl kernel.numa_balancing=0",
    ),
    "mbind": (
        {},
        {"nodes": TWO_NODES, "rates": TWO_RATES, "mbind_errno": errno.EPERM, "in_container": True},
        "EPERM",
        "38% of the read bandwidth",  # a half from 100, a half from 45: 62 of 100
        "--cap-add SYS_NICE",
    ),
    "mbind unmeasured": (
        {},
        {"nodes": TWO_NODES, "rates": None, "mbind_errno": errno.EPERM},
        "EPERM",
        "50% of the reads",
        "SystemCallFilter",
    ),
    "modules empty": (
        {},
        {"dimms": (*DIMMS[:3], Dimm("0/D", 0)), "rates": Rates(100.0, 0.0)},
        "3 x DDR5-4800 on 3 of 4 channels",
        "25%",
        "0/D",
    ),
    "modules slow": (
        {},
        {"dimms": tuple(Dimm(d.channel, d.bytes, d.kind, 3600, 4800) for d in DIMMS)},
        "DDR5-3600",
        "25% of the read bandwidth: they run at 3600, and could at 4800",
        "BIOS",
    ),
    "bandwidth": (
        {},
        {"rates": Rates(52.0, 0.0)},
        "52.0 GB/s, 34% of the channels' 154",
        "40%",
        "the memory settings of the BIOS",
    ),
    "gpus taken": (
        {},
        {"gpus": (replace(GPU, free_bytes=44 * 10**9),), "torch_cuda": "13.0", "sglang_takes_kt": True},
        "1 x NVIDIA H200: 44 of 144 GB free",
        "100 GB",
        "nvidia-smi",
    ),
    "gpus hidden": (
        {"/proc/driver/nvidia/version": "NVRM version: 580"},
        {"in_container": True},
        "nvidia-smi shows no GPU",
        "CPU",
        "--gpus all",
    ),
    "engine idle": (
        {},
        {"gpus": (GPU,), "torch_cuda": "13.0"},
        "although there is a GPU",
        "does nothing",
        "pip install sglang",
    ),
    "engine none": (
        {},
        {"installed": {name: INSTALLED[name] for name in ("numpy", "torch")}},
        "neither SGLang",
        "kt run",
        "kt-kernel[engine]",
    ),
    "engine old": ({}, {"sglang_takes_kt": False}, "no --kt-* options", "experts", "sglang>=0.5.17"),
    "torch missing": ({}, {"installed": {"numpy": INSTALLED["numpy"]}}, "not installed", "not work", "torch>=2.4"),
    "torch old": (
        {},
        {"installed": INSTALLED | {"torch": Installed("2.3.1", {})}},
        "2.3.1; torch>=2.4 is needed",
        "kt",
        "pip install 'torch>=2.4'",
    ),
    "transformers new": (
        {},
        {"installed": INSTALLED | {"transformers": Installed("6.0.1", {})}},
        "6.0.1; transformers>=5.21,<6 is needed",
        "kt run",
        "pip install",
    ),
    "transformers of sglang without a gpu": (
        {},
        {
            "installed": INSTALLED
            | {"transformers": Installed("5.12.1", {}), "sglang": Installed("0.5.17", {"transformers": "5.12.1"})},
            "sglang_takes_kt": True,
        },
        "5.12.1, as sglang wants it; the embedded engine needs transformers>=5.21,<6",
        "kt verify MODEL",
        "venv",
    ),
    "sglang pins": (
        {},
        {"installed": INSTALLED | {"sglang": Installed("0.5.17", {"torch": "2.11.0"})}, "sglang_takes_kt": True},
        "0.5.17 wants torch 2.11.0, 2.13.0+cpu is installed",
        "starts",
        "pip install 'torch==2.11.0'",
    ),
    "cuda none": (
        {},
        {"gpus": (GPU,), "sglang_takes_kt": True},
        "built for the CPU",
        "no GPU",
        "--force-reinstall torch",
    ),
    "cuda old": (
        {},
        {"gpus": (replace(GPU, driver="550.54.14"),), "torch_cuda": "13.0", "sglang_takes_kt": True},
        "driver 550.54.14, torch built for CUDA 13.0",
        "CUDA 13.0 needs driver 580.65.06",
        "580.65.06 or newer",
    ),
    "settings": ({}, {"settings_error": "config.yaml: damaged"}, "damaged", "stop", "kt config reset"),
    "disk": ({}, {"disks": {"/models": Disk("/", "", 10**12, 10**10)}}, "10 GB free", "130 GB", "paths.models"),
    "proxies": ({}, {"proxies": {"http_proxy": "http://p:1"}}, "http_proxy", "error page", "NO_PROXY=127.0.0.1"),
    "port": ({}, {"port_error": "Address already in use"}, "already in use", "another port", "server.port 8001"),
}

ERRORS = {"python", "instruction_set emulated", "torch missing", "torch old", "cuda old", "settings"}


@pytest.mark.parametrize("case", CASES)
def test_a_finding_appears_and_goes_away(case, tmp_path):
    """With its cost and the way out; nothing else is found. Without the cause there is nothing: the first test."""
    files, changes, value, cost, fix = CASES[case]
    check = case.split()[0]
    found = findings(facts_of(tmp_path / "bad", files, **changes))
    assert found[check].status is (Status.ERROR if case in ERRORS else Status.WARNING)
    assert value in found[check].value
    assert cost in found[check].cost
    assert fix in found[check].fix
    others = {name for name, finding in found.items() if finding.status is not Status.OK} - {check}
    assert others <= ({"engine"} if case == "torch missing" else set())


def test_beside_a_gpu_versions_are_sglangs(tmp_path):
    """What the embedded engine wants would break the engine that is used."""
    pinned = {"transformers": Installed("5.12.1", {}), "sglang": Installed("0.5.17", {"transformers": "5.12.1"})}
    changes = {"gpus": (GPU,), "torch_cuda": "12.8", "sglang_takes_kt": True}
    found = findings(facts_of(tmp_path, installed=INSTALLED | pinned, **changes))
    assert found["transformers"].status is Status.OK
    assert "as sglang wants it" in found["transformers"].value


def test_every_instruction_set_has_its_figure():
    native = {variant.name for variant in _core.variants() if not variant.emulated}
    assert native == set(cpu._OPERATIONS)


def test_values_that_are_no_trouble(tmp_path):
    balanced = governor("powersave", "intel_pstate", "balance_performance")
    found = findings(facts_of(tmp_path, balanced, cpu_quota=8.0, proxies={"ALL_PROXY": "p"}, no_proxy="*"))
    assert found["governor"].value == "powersave (balance_performance)"
    assert found["quota"].value == "time of 8 CPUs for 8 cores"
    assert found["proxies"].status is Status.OK
    assert found["threads"].value == "8; 8 SMT siblings are left alone"


def test_saving_preference_of_a_driver_with_its_own_governor(tmp_path):
    files = governor("powersave", "amd-pstate-epp", "power") | governor("performance", "amd-pstate-epp", "power", 1)
    assert findings(facts_of(tmp_path, files))["governor"].value == "powersave (power) on 2 of 2 CPUs"


def test_several_nodes_tell_what_reads_across_cost(tmp_path):
    found = findings(facts_of(tmp_path, nodes=TWO_NODES, rates=TWO_RATES))
    assert found["cross_node"].value == "another node is read at 40% of the speed of the own"
    assert found["cross_node"].details[0] == "cores of node 0 from memory of node 1: 40.0 GB/s"
    assert found["mbind"].status is Status.OK
    assert "mbind" not in findings(facts_of(tmp_path, mbind_errno=errno.EPERM))  # one node: nothing to place


def test_unknown_modules_are_said_to_be_unknown(tmp_path):
    found = findings(facts_of(tmp_path, dimms=()))
    assert "not known here" in found["modules"].value
    assert found["bandwidth"].value == "130.0 GB/s; what the channels could give is not known here"
    assert found["bandwidth"].status is Status.OK


def test_low_bandwidth_names_its_causes(tmp_path):
    files = {"/sys/kernel/mm/transparent_hugepage/enabled": "never"}
    changes = {"rates": Rates(52.0, 0.5), "dimms": (*DIMMS, Dimm("0/E", 0)), "cpu_quota": 4.0}
    found = findings(facts_of(tmp_path, files, **changes))
    causes = "CPU quota, Other processes, Huge pages, Memory modules"
    assert found["bandwidth"].fix == f"first what costs bandwidth above: {causes}"


def test_a_cpuset_of_version_1(tmp_path):
    files = {
        "/sys/devices/system/cpu/online": "0-31",
        "/proc/self/cgroup": "4:cpuset:/box\n3:memory:/box",
        "/sys/fs/cgroup/cpuset/box/cpuset.effective_cpus": "0-7,16-23",
    }
    assert findings(facts_of(tmp_path, files))["cpus"].value == "16 of 32: a cpuset hides the others"


def test_sglang_without_our_options_is_an_error_where_a_gpu_is(tmp_path):
    found = findings(facts_of(tmp_path, gpus=(GPU,), torch_cuda="13.0", sglang_takes_kt=False))
    assert found["engine"].status is Status.ERROR
    fine = findings(facts_of(tmp_path, gpus=(GPU,), torch_cuda="13.0", sglang_takes_kt=True))
    assert fine["engine"].value == "SGLang"
    assert fine["cuda"].status is Status.OK
    assert fine["gpus"].value == "1 x NVIDIA H200: 143 of 144 GB free"


def test_a_newer_package_is_named_but_no_trouble(tmp_path):
    found = findings(facts_of(tmp_path, installed=INSTALLED | {"torch": Installed("2.14.1", {})}))
    assert found["torch"].status is Status.OK
    assert found["torch"].value == "2.14.1, newer than 2.13.0, which was tested"
