"""What Linux tells about CPUs, memory and cgroups, as plain numbers; 0 or nothing where it does not tell.

Functions with a ``root`` read the files below it, so that other machines can be looked at in tests.
"""

import os
import platform
import re
import time
from pathlib import Path

_ROOT = Path("/")
# cgroup v1 writes "no limit" as a number near 2^63.
_NO_LIMIT = 1 << 60


def cpu_model(cpuinfo: str | None = None) -> str:
    text = cpuinfo if cpuinfo is not None else read("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def usable_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def physical_cores() -> int:
    siblings = set()
    for cpu in usable_cpus():
        text = read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(text.strip() or str(cpu))
    return len(siblings)


def l3_bytes() -> int:
    """All last-level caches that the usable CPUs reach, together."""
    found = {}
    for cpu in usable_cpus():
        for index in Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            if read(index / "level").strip() == "3":
                size = re.fullmatch(r"(\d+)([KM]?)", read(index / "size").strip())
                if size:
                    unit = {"": 1, "K": 1 << 10, "M": 1 << 20}[size.group(2)]
                    found[read(index / "shared_cpu_list").strip()] = int(size.group(1)) * unit
    return sum(found.values())


def memory_bytes(root: Path = _ROOT) -> int:
    """What this process could have at most: of the machine, or of its cgroup."""
    limits = [limit for limit, _ in _cgroup_memory(root)]
    return min([_meminfo(root, "MemTotal"), *limits])


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that can be taken without swapping, also within the limits of cgroups."""
    left = [max(0, limit - used) for limit, used in _cgroup_memory(root)]
    return min([_meminfo(root, "MemAvailable"), *left])


def node_memory(node: int, root: Path = _ROOT) -> tuple[int, int]:
    """(all, free) bytes of a NUMA node; pages that the file cache would give back count as free."""
    text = read(root / f"sys/devices/system/node/node{node}/meminfo")
    found = {key: int(value) * 1024 for key, value in re.findall(r"^Node \d+ (\S+):\s+(\d+) kB", text, re.MULTILINE)}
    free = sum(found.get(key, 0) for key in ("MemFree", "Inactive(file)", "Active(file)", "SReclaimable"))
    return found.get("MemTotal", 0), free


def huge_pages(root: Path = _ROOT) -> str:
    """Whether the kernel gives transparent huge pages: always, madvise or never; empty if it does not tell."""
    match = re.search(r"\[(\w+)\]", read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return match.group(1) if match else ""


def busy_share(seconds: float = 0.3) -> float:
    """CPU time that others use while we sleep, of all CPUs."""

    def ticks() -> tuple[int, int]:
        fields = [int(field) for field in read("/proc/stat").partition("\n")[0].split()[1:9]] or [0] * 8
        return sum(fields), fields[3] + fields[4]  # all, idle (waiting for a disk included)

    total, idle = ticks()
    time.sleep(seconds)
    later_total, later_idle = ticks()
    return 1 - (later_idle - idle) / (later_total - total) if later_total > total else 0.0


def read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _meminfo(root: Path, key: str) -> int:
    match = re.search(rf"^{re.escape(key)}:\s+(\d+) kB", read(root / "proc/meminfo"), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def _cgroup_memory(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of every group of this process that has a limit. A group lies within the limits of its parents.

    File pages that nothing used lately count as used there, but go before anybody is killed: they are taken off.
    """
    found = []
    for folder, limit_file, used_file in _memory_groups(root):
        limit, used = (read(folder / name).strip() for name in (limit_file, used_file))
        if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT:
            stat = re.search(r"^(?:total_)?inactive_file (\d+)$", read(folder / "memory.stat"), re.MULTILINE)
            found.append((int(limit), max(0, int(used) - (int(stat.group(1)) if stat else 0))))
    return found


def _memory_groups(root: Path) -> list[tuple[Path, str, str]]:
    """Folders of version 2 and 1, innermost first; a container often sees its own group as the top one."""
    mounted = root / "sys/fs/cgroup"
    groups = []
    for line in read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            names = ("memory.max", "memory.current")
            top = mounted
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            top = mounted / "memory"
        else:
            continue
        inner = top / path.strip("/")
        folders = [inner, *inner.parents]
        groups += [(folder, *names) for folder in folders[: folders.index(top) + 1] if folder.is_dir()]
    return groups or [(mounted, "memory.max", "memory.current")]
