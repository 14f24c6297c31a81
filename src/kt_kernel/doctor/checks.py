"""The list of checks, in the order they are shown in."""

from collections.abc import Callable

from kt_kernel.doctor import cpu, gpu, memory, software, surroundings
from kt_kernel.doctor.facts import Facts
from kt_kernel.doctor.finding import Finding

Check = Callable[[Facts], Finding | list[Finding] | None]

CHECKS: tuple[Check, ...] = (
    software.python,
    software.environment,
    software.kernel,
    cpu.processor,
    cpu.instruction_set,
    cpu.hidden_cores,
    cpu.quota,
    cpu.siblings,
    cpu.governor,
    cpu.load,
    memory.memory,
    memory.memory_limit,
    memory.swap,
    memory.huge_pages,
    memory.reserved_pages,
    memory.numa,
    memory.mbind,
    memory.modules,
    memory.bandwidth,
    memory.cross_node,
    gpu.gpus,
    gpu.driver,
    software.engine,
    software.versions,
    surroundings.settings_file,
    surroundings.disks,
    surroundings.proxies,
    surroundings.port,
)


def examine(facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    for check in CHECKS:
        result = check(facts)
        found += result if isinstance(result, list) else [] if result is None else [result]
    return found
