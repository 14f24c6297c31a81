"""Facts about this machine that a figure needs beside it."""

import os
import platform
import re
from pathlib import Path


def facts() -> dict:
    return {
        "cpu": cpu_model(),
        "cpus": len(usable_cpus()),
        "cores": physical_cores(),
        "l3_bytes": l3_bytes(),
        "memory_bytes": _meminfo("MemTotal"),
        "kernel": platform.release(),
    }


def cpu_model(cpuinfo: str | None = None) -> str:
    text = cpuinfo if cpuinfo is not None else _read("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def slug(cpu: str, variant: str) -> str:
    """A file name from a CPU's marketing name: without clock, core count and trademark signs."""
    name = re.sub(r"\((?:r|tm)\)|@.*|\b\d+-core\b|\bprocessor\b|\bcpu\b", " ", cpu.lower())
    name = re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "cpu"
    return f"{name}-{variant}"


def usable_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def physical_cores() -> int:
    siblings = set()
    for cpu in usable_cpus():
        text = _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(text.strip() or str(cpu))
    return len(siblings)


def l3_bytes() -> int:
    """All last-level caches that the usable CPUs reach, together; 0 where the system does not tell."""
    found = {}
    for cpu in usable_cpus():
        for index in Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            if _read(index / "level").strip() == "3":
                size = re.fullmatch(r"(\d+)([KM]?)", _read(index / "size").strip())
                if size:
                    unit = {"": 1, "K": 1 << 10, "M": 1 << 20}[size.group(2)]
                    found[_read(index / "shared_cpu_list").strip()] = int(size.group(1)) * unit
    return sum(found.values())


def available_bytes() -> int:
    """Memory that can be taken without swapping, also within the limit of a cgroup."""
    available = _meminfo("MemAvailable")
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, int(limit) - int(used))
    return available


def _meminfo(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
