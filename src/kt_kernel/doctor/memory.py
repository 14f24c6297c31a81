"""Checks of memory: how much there is, how fast it is, and where it lies."""

import re

from kt_kernel.cli.language import t
from kt_kernel.doctor import cpu
from kt_kernel.doctor.dimms import peak_gbps
from kt_kernel.doctor.facts import Facts, error_name
from kt_kernel.doctor.finding import Finding, Status
from kt_kernel.machine import system

_GB = 1e9
_LEAST_BYTES = 32e9
_SWAPPED_BYTES = 256e6  # what a system that has slept a while may have put aside
_RESERVED_SHARE = 0.02
# Reading with all cores reaches 80 to 90 % of what the channels could; below _GOOD_SHARE something is wrong.
_USUAL_SHARE, _GOOD_SHARE = 0.85, 0.6


def memory(facts: Facts) -> Finding:
    total, available = facts.machine.memory_bytes, facts.machine.available_bytes
    value = t("{total} GB, {available} GB available", total=_gb(total), available=_gb(available))
    if total >= _LEAST_BYTES:
        return Finding("memory", t("Memory"), value)
    return Finding(
        "memory",
        t("Memory"),
        value,
        Status.WARNING,
        t("a model of 30 billion weights needs 17 GB in 4 bits, one of 235 billion 130 GB"),
        "kt plan MODEL",
    )


def memory_limit(facts: Facts) -> Finding:
    """Of the cgroup."""
    machine, title = _meminfo(facts, "MemTotal"), t("Memory limit")
    allowed = system.memory_bytes(facts.root)
    if allowed >= machine:
        return Finding("memory_limit", title, t("none"))
    fix = f"docker update --memory {machine >> 30}g --memory-swap {machine >> 30}g CONTAINER"
    return Finding(
        "memory_limit",
        title,
        t("the cgroup allows {allowed} of {total} GB", allowed=_gb(allowed), total=_gb(machine)),
        Status.WARNING,
        t("a model that takes more is killed, without a word of its own"),
        fix if facts.in_container else "systemctl set-property --runtime UNIT MemoryMax=infinity",
    )


def swap(facts: Facts) -> Finding:
    total, free = _meminfo(facts, "SwapTotal"), _meminfo(facts, "SwapFree")
    used, title = total - free, t("Swap")
    if not total:
        return Finding("swap", title, t("none"))
    value = t("{used} of {total} GB in use", used=_gb(used), total=_gb(total))
    if used <= _SWAPPED_BYTES:
        return Finding("swap", title, value)
    return Finding(
        "swap",
        title,
        value,
        Status.WARNING,
        t("a page of weights that was swapped out comes back in 0.1 ms or more, from memory it takes 0.3 us"),
        "sudo swapoff -a && sudo swapon -a",
    )


def huge_pages(facts: Facts) -> Finding:
    """Transparent ones; packed weights ask for them with madvise."""
    mode, title = system.huge_pages(facts.root), t("Huge pages")
    if mode in ("always", "madvise"):
        return Finding("huge_pages", title, t("transparent, {mode}", mode=mode))
    return Finding(
        "huge_pages",
        title,
        t("transparent huge pages are off") if mode == "never" else t("this kernel has no transparent huge pages"),
        Status.WARNING,
        t("about 8 % of the read bandwidth (measured on one core of Zen 3)"),
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def reserved_pages(facts: Facts) -> Finding | None:
    """hugetlb: pages set aside for programs that ask for them by name. Weights do not."""
    counts = {key: _meminfo_number(facts, key) for key in ("HugePages_Total", "HugePages_Free", "Hugepagesize")}
    idle = counts["HugePages_Free"] * counts["Hugepagesize"] * 1024
    if not counts["HugePages_Total"]:
        return None
    title = t("Reserved huge pages")
    value = t("{idle} GB are reserved and unused", idle=_gb(idle))
    if idle <= _RESERVED_SHARE * _meminfo(facts, "MemTotal"):
        return Finding("reserved_pages", title, value)
    return Finding(
        "reserved_pages",
        title,
        value,
        Status.WARNING,
        t("{idle} GB that no model can use", idle=_gb(idle)),
        "sudo sysctl vm.nr_hugepages=0",
    )


def numa(facts: Facts) -> Finding:
    nodes, title = facts.machine.nodes, t("NUMA nodes")
    details = tuple(
        t("node {id}: {cores} cores, {memory} GB", id=node.id, cores=node.cores, memory=_gb(node.memory_bytes))
        for node in nodes
    )
    bare = [node for node in nodes if node.id >= 0 and node.memory_id != node.id]
    if bare:
        return Finding(
            "numa",
            title,
            t("{nodes}; node {id} has CPUs and no memory", nodes=len(nodes), id=bare[0].id),
            Status.WARNING,
            t("its cores read everything from another node"),
            t("put modules into its slots, or choose NPS1 (AMD), SNC off (Intel) in the BIOS"),
            details,
        )
    if len(nodes) > 1 and facts.read("/proc/sys/kernel/numa_balancing") not in ("", "0"):
        return Finding(
            "numa",
            title,
            t("{nodes}; the kernel moves pages between them", nodes=len(nodes)),
            Status.WARNING,
            t("page faults in every step: weights are where they belong already"),
            "sudo sysctl kernel.numa_balancing=0",
            details,
        )
    return Finding("numa", title, str(len(nodes)), details=details)


def mbind(facts: Facts) -> Finding | None:
    """Only where there are several nodes it matters."""
    if len(facts.machine.nodes) < 2:
        return None
    title = t("Memory placement")
    if not facts.mbind_errno:
        return Finding("mbind", title, t("allowed"))
    return Finding(
        "mbind",
        title,
        t("mbind is denied: {error}", error=error_name(facts.mbind_errno)),
        Status.WARNING,
        _placement_cost(facts),
        "docker run --cap-add SYS_NICE ..."
        if facts.in_container
        else t("allow the system call mbind (seccomp, or the service's SystemCallFilter=)"),
    )


def _placement_cost(facts: Facts) -> str:
    """Of n nodes, a page is remote in n - 1 of n cases."""
    nodes = len(facts.machine.nodes)
    if facts.rates is None or not facts.rates.remote:
        return t("weights lie on any node: up to {share} of the reads cross nodes", share=f"{1 - 1 / nodes:.0%}")
    local = sum(facts.rates.local.values()) / len(facts.rates.local)
    remote = sum(facts.rates.remote.values()) / len(facts.rates.remote)
    mean = nodes / (1 / local + (nodes - 1) / remote)
    return t("weights lie on any node: up to {share} of the read bandwidth", share=f"{max(0.0, 1 - mean / local):.0%}")


def modules(facts: Facts) -> Finding:
    found, title = facts.dimms, t("Memory modules")
    if not found:
        return Finding(
            "modules",
            title,
            t("not known here; 'sudo dmidecode -t memory' lists them where the firmware tells"),
        )
    filled = [dimm for dimm in found if dimm.bytes]
    channels = {dimm.channel for dimm in found}
    empty = channels - {dimm.channel for dimm in filled}
    speed = min(dimm.transfers for dimm in filled)
    kind = f"{filled[0].kind}-{speed}" if speed else filled[0].kind or "DIMM"
    value = t(
        "{count} x {kind} on {used} of {channels} channels",
        count=len(filled),
        kind=kind,
        used=len(channels) - len(empty),
        channels=len(channels),
    )
    if empty:
        return Finding(
            "modules",
            title,
            value,
            Status.WARNING,
            t("{share} of the read bandwidth", share=f"{len(empty) / len(channels):.0%}"),
            t("put a module into every channel: {empty} have none", empty=", ".join(sorted(empty))),
        )
    rated = min(dimm.rated or dimm.transfers for dimm in filled)
    if rated > speed:
        return Finding(
            "modules",
            title,
            value,
            Status.WARNING,
            t(
                "{share} of the read bandwidth: they run at {speed}, and could at {rated}",
                share=f"{1 - speed / rated:.0%}",
                speed=speed,
                rated=rated,
            ),
            t("one module for each channel, and the memory speed in the BIOS"),
        )
    return Finding("modules", title, value)


def bandwidth(facts: Facts) -> Finding | None:
    if facts.rates is None:
        return None
    title, read = t("Read bandwidth"), facts.rates.read
    peak = peak_gbps(facts.dimms)
    if peak is None:
        return Finding(
            "bandwidth",
            title,
            t("{read} GB/s; what the channels could give is not known here", read=f"{read:.1f}"),
        )
    share = read / peak
    value = t(
        "{read} GB/s, {share} of the channels' {peak}", read=f"{read:.1f}", share=f"{share:.0%}", peak=f"{peak:.0f}"
    )
    if share >= _GOOD_SHARE:
        return Finding("bandwidth", title, value)
    return Finding(
        "bandwidth",
        title,
        value,
        Status.WARNING,
        t("answers come at {share} of the speed that the memory allows", share=f"{share / _USUAL_SHARE:.0%}"),
        t("first what costs bandwidth above: {causes}", causes=", ".join(causes))
        if (causes := _causes(facts))
        else t("the memory settings of the BIOS: speed, interleaving, NPS or SNC"),
    )


def _causes(facts: Facts) -> list[str]:
    """Titles of findings that slow reading down."""
    checks = (cpu.hidden_cores, cpu.quota, cpu.governor, cpu.load, huge_pages, numa, mbind, modules)
    found = [check(facts) for check in checks]
    return [finding.title for finding in found if finding is not None and finding.status is not Status.OK]


def cross_node(facts: Facts) -> Finding | None:
    """Told where there are several nodes: kernels read their own node alone, so it costs only what is placed wrong."""
    if facts.rates is None or not facts.rates.remote:
        return None
    details = tuple(
        t(
            "cores of node {cores} from memory of node {memory}: {rate} GB/s",
            cores=cores,
            memory=memory_of,
            rate=f"{rate:.1f}",
        )
        for (cores, memory_of), rate in sorted(facts.rates.remote.items())
    )
    worst = min(rate / facts.rates.local[cores] for (cores, _), rate in facts.rates.remote.items())
    value = t("another node is read at {share} of the speed of the own", share=f"{worst:.0%}")
    return Finding("cross_node", t("Reads across nodes"), value, details=details)


def _meminfo_number(facts: Facts, key: str) -> int:
    match = re.search(rf"^{re.escape(key)}:\s+(\d+)", facts.read("/proc/meminfo"), re.MULTILINE)
    return int(match.group(1)) if match else 0


def _meminfo(facts: Facts, key: str) -> int:
    """Bytes."""
    return _meminfo_number(facts, key) * 1024


def _gb(count: float) -> str:
    return f"{count / _GB:.1f}" if count < 100 * _GB else f"{count / _GB:.0f}"
