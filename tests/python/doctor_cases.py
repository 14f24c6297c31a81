"""A machine in order, and what to change about it to make checks find something."""

from dataclasses import replace
from pathlib import Path

from kt_kernel.doctor.checks import examine
from kt_kernel.doctor.dimms import Dimm
from kt_kernel.doctor.facts import Facts, Rates
from kt_kernel.doctor.finding import Finding
from kt_kernel.doctor.packages import Installed
from kt_kernel.machine.facts import Disk, Machine, Node, Variant
from kt_kernel.machine.gpus import Gpu

GIB = 1 << 30
MEMINFO = "MemTotal: {total} kB\nMemAvailable: {total} kB\nSwapTotal: {swap} kB\nSwapFree: {swap_free} kB\n"

GPU = Gpu(0, "GPU-a", "NVIDIA H200", 144 * 10**9, 143 * 10**9, "9.0", "580.95.05")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def meminfo(total_gib: int = 64, swap_gib: int = 0, swapped_gib: int = 0, rest: str = "") -> str:
    kb = 1 << 20
    return MEMINFO.format(total=total_gib * kb, swap=swap_gib * kb, swap_free=(swap_gib - swapped_gib) * kb) + rest


def node(number: int, cpus: range, memory: int | None = None) -> Node:
    """The second half of the CPUs are siblings of the first."""
    return Node(number, number if memory is None else memory, tuple(cpus), len(cpus) // 2, 32 * GIB, 30 * GIB)


ONE_NODE = (node(0, range(16)),)
TWO_NODES = (node(0, range(8)), node(1, range(8, 16)))

MACHINE = Machine(
    cpu="Some CPU",
    variant="avx512_bf16",
    refused=(Variant("amx", "this CPU lacks amx_tile"),),
    nodes=ONE_NODE,
    packages=1,
    cpu_quota=0.0,
    l3_bytes=32 << 20,
    memory_bytes=64 * GIB,
    available_bytes=60 * GIB,
    gpus=(),
    disks=(),
)

INSTALLED = {
    "numpy": Installed("2.4.6", {}),
    "torch": Installed("2.13.0+cpu", {}),
    "transformers": Installed("5.22.2", {}),
    "huggingface_hub": Installed("2.4.0", {}),
}

DIMMS = tuple(Dimm(f"0/{channel}", 16 * GIB, "DDR5", 4800, 4800) for channel in "ABCD")


def facts_of(root: Path, files: dict[str, str] | None = None, **changes: object) -> Facts:
    """Nothing is wrong there, but for `files` below root and `changes`, of Facts or of its Machine."""
    usual = {
        "/proc/meminfo": meminfo(),
        "/sys/devices/system/cpu/online": "0-15",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    }
    write(root, usual | (files or {}))
    of_machine = {name: changes.pop(name) for name in [*changes] if name not in Facts.__dataclass_fields__}
    good = Facts(
        machine=replace(MACHINE, **of_machine),
        root=root,
        rates=Rates(read=130.0, busy_share=0.0),
        dimms=DIMMS,
        best_variant="avx512_bf16",
        installed=INSTALLED,
        disks={"/models": Disk("/", "/dev/sda", 10**12, 9 * 10**11)},
    )
    return replace(good, **changes)


def findings(facts: Facts) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(facts)}
