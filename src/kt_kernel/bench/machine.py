"""Facts about this machine that a figure needs beside it."""

import platform
import re

from kt_kernel.machine import system


def facts() -> dict:
    return {
        "cpu": system.cpu_model(),
        "cpus": len(system.usable_cpus()),
        "cores": system.physical_cores(),
        "l3_bytes": system.l3_bytes(),
        "memory_bytes": system.memory_bytes(),
        "kernel": platform.release(),
    }


def slug(cpu: str, variant: str) -> str:
    """A file name from a CPU's marketing name: without clock, core count and trademark signs."""
    name = re.sub(r"\((?:r|tm)\)|@.*|\b\d+-core\b|\bprocessor\b|\bcpu\b", " ", cpu.lower())
    name = re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "cpu"
    return f"{name}-{variant}"
