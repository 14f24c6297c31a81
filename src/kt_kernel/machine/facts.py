"""What this process has to work with on this machine, as it is now."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import kt_kernel
from kt_kernel import _core
from kt_kernel.machine import system
from kt_kernel.machine.gpus import Gpu, gpus


@dataclass(frozen=True)
class Node:
    """A NUMA node with CPUs that this process may use."""

    id: int  # -1 where the system does not tell
    memory_id: int  # of the memory nearest to its CPUs
    cpus: tuple[int, ...]  # one of each physical core first, then the SMT siblings
    cores: int  # how many of them come before the siblings
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Variant:
    """An instruction set that does not run here."""

    name: str
    reason: str


@dataclass(frozen=True)
class Disk:
    mount: str
    device: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    cpu: str  # its name
    variant: str  # the instruction set that computes
    refused: tuple[Variant, ...]  # better ones, best first
    nodes: tuple[Node, ...]
    packages: int
    cpu_quota: float  # CPUs' worth of time that the cgroup allows; 0 = no limit
    l3_bytes: int
    memory_bytes: int  # this and below: also within the limits of cgroups
    available_bytes: int
    gpus: tuple[Gpu, ...]
    disks: tuple[Disk, ...]

    @property
    def cpus(self) -> int:
        return sum(len(node.cpus) for node in self.nodes)

    @property
    def cores(self) -> int:
        """Physical ones inside the affinity mask."""
        return sum(node.cores for node in self.nodes)

    @property
    def siblings(self) -> int:
        """Usable CPUs that share a core with one counted before them."""
        return self.cpus - self.cores

    @property
    def threads(self) -> int:
        """Worker threads that help: one for each core, and no more than the cgroup gives time for."""
        allowed = int(self.cpu_quota) if self.cpu_quota else self.cores
        return max(1, min(self.cores, allowed))


def machine() -> Machine:
    topology = _core.topology()
    return Machine(
        cpu=system.cpu_model(),
        variant=kt_kernel.__cpu_variant__,
        refused=_refused(kt_kernel.__cpu_variant__),
        nodes=tuple(_node(node, len(topology.nodes)) for node in topology.nodes),
        packages=topology.packages,
        cpu_quota=topology.cpu_quota,
        l3_bytes=system.l3_bytes(),
        memory_bytes=system.memory_bytes(),
        available_bytes=system.available_bytes(),
        gpus=gpus(),
        disks=disks(),
    )


def disk_of(path: str | os.PathLike[str]) -> Disk:
    """The file system where a file of this name is, or would be."""
    folder = Path(path).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    number = folder.stat().st_dev
    mount = folder
    while mount != mount.parent and mount.parent.stat().st_dev == number:
        mount = mount.parent
    device = {where: device for device, where in _mounts()}.get(str(mount), "")
    return _disk(str(mount), device)


def disks() -> tuple[Disk, ...]:
    """File systems on block devices, each device once, and the root."""
    found: dict[str, Disk] = {}
    for device, mount in _mounts():
        if (device.startswith("/dev/") or mount == "/") and device not in found and Path(mount).is_dir():
            try:
                found[device] = _disk(mount, device)
            except OSError:
                continue  # unmounted meanwhile, or not for us
    return tuple(found.values())


def _node(node: "_core.TopologyNode", nodes: int) -> Node:
    total, free = system.node_memory(max(node.memory_id, 0))
    if nodes == 1 and not total:
        total, free = system.memory_bytes(), system.available_bytes()
    return Node(node.id, node.memory_id, tuple(node.cpus), node.physical_cores, total, free)


def _refused(variant: str) -> tuple[Variant, ...]:
    """Rows above the one that computes. One without a reason was passed over: forced away, or its registers denied."""
    found = []
    for row in _core.variants():
        if row.name == variant:
            break
        if not row.emulated:
            found.append(Variant(row.name, row.reason or "another one was asked for, or its registers were denied"))
    return tuple(found)


def _mounts() -> list[tuple[str, str]]:
    """(device, mount); the kernel writes spaces and the like as octal escapes."""
    lines = [line.split()[:2] for line in system.read("/proc/self/mounts").splitlines()]
    return [tuple(_unescaped(word) for word in words) for words in lines if len(words) == 2]


def _unescaped(word: str) -> str:
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match.group(1), 8)), word)


def _disk(mount: str, device: str) -> Disk:
    found = os.statvfs(mount)
    return Disk(mount, device, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
