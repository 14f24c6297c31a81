"""Bandwidths as they are now, in a process of its own: memory of several GB goes back when it ends."""

from kt_kernel.bench.client import Client
from kt_kernel.doctor.facts import Rates
from kt_kernel.machine import system

_SECONDS = 0.5  # for each figure; the best of many rounds counts
_LEAST_BYTES = 512 << 20
_MOST_SHARE = 0.25  # of the memory that is free


def measure() -> Rates:
    """BenchError where the process ends before it answers."""
    busy = system.busy_share()
    with Client("doctor") as side:
        found = side.call("rates", gigabytes=probe_gigabytes(), seconds=_SECONDS)
    remote = {(cores, memory): rate for cores, memory, rate in found["remote"]}
    return Rates(found["read"], busy, {int(node): rate for node, rate in found["local"].items()}, remote)


def probe_gigabytes() -> float:
    """Four times the last-level caches, so that they hold little of it."""
    wanted = max(_LEAST_BYTES, 4 * system.l3_bytes())
    return min(wanted, _MOST_SHARE * system.available_bytes()) / 1e9


class DoctorSide:
    """Answers the requests of ``kt_kernel.bench.client``; every public method is one."""

    def rates(self, gigabytes: float, seconds: float) -> dict:
        from kt_kernel import _core

        nodes = _core.topology().nodes
        every = _core.Pool(
            [node.physical_cores for node in nodes],
            [node.memory_id for node in nodes],
            [node.cpus[: node.physical_cores] for node in nodes],
        )
        found = {"read": _core.measure_read_bandwidth(every, gigabytes, seconds), "local": {}, "remote": []}
        for cores in nodes if len(nodes) > 1 else ():
            for memory in nodes:
                pool = _core.Pool([cores.physical_cores], [memory.memory_id], [cores.cpus[: cores.physical_cores]])
                rate = _core.measure_read_bandwidth(pool, gigabytes / len(nodes), seconds)
                if memory.id == cores.id:
                    found["local"][cores.id] = rate
                else:
                    found["remote"].append((cores.id, memory.id, rate))
        return found
