"""What this machine can do, measured in seconds and kept for the next time.

Measurements are kept in the cache folder, one file for each machine: its CPU, instruction set, CPUs of this process,
threads, memory and the version of kt-kernel. Each has a name, so that a plan measures only what it needs and nobody
has measured yet. What was measured while others used the CPUs is measured again once they use less than half as much.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import kt_kernel
from kt_kernel import _core, cached_json
from kt_kernel.bench.layer import PEAK_UNITS
from kt_kernel.machine import disk_speed, system
from kt_kernel.machine.decode_overhead import DecodeOverhead, Heads, measure_decode_overhead
from kt_kernel.machine.facts import Machine, machine
from kt_kernel.machine.linears import Matrix, measure_linear_call_us, measure_linears
from kt_kernel.machine.products import Products, measure_products
from kt_kernel.machine.torch_layer import TorchLayer, measure_sampling_us, measure_torch_layer
from kt_kernel.runtime import plan_pool

# Raised when a measurement means something else than before.
SCHEMA = 1
FORMATS = ("bf16", "int8", "int4", "int4g")
# Share of the CPUs that others may use without a word about it.
QUIET = 0.1
# Experts of a middling model: where nobody names a shape.
USUAL_HIDDEN, USUAL_INTERMEDIATE = 2048, 768
# Parts of the time that a probe of everything takes: one of each of these.
_SHARES = 2 + len(PEAK_UNITS) + len(FORMATS)

_ENTRY = {"time", "busy", "value"}  # of a measurement

Say = Callable[[str], None]


@dataclass(frozen=True)
class Rates:
    """GB/s are 1e9 bytes; peaks are operations per second, a multiply-add is 2."""

    threads: int
    read_gbps: float  # all workers, each the memory of its node
    node_read_gbps: dict[int, float]  # of each node by itself; one of a single node is the same figure
    peaks: dict[str, float]  # by unit: fma_f32, dot_bf16, ...
    products: dict[str, Products]  # by format, of experts of the usual shape
    disk_gbps: float | None  # of the disk with the cache folder; None: it could not be written to


class Probe:
    """Measurements of this machine with a number of threads; each is taken once and kept."""

    def __init__(
        self,
        found: Machine | None = None,
        threads: int | None = None,
        *,
        fresh: bool = False,
        folder: Path | None = None,
        say: Say = lambda line: None,
    ):
        """`fresh`: nothing of earlier probes is used. `say` is told what is measured before it is."""
        self.machine = found or machine()
        self.threads = threads or self.machine.threads
        self.identity = _identity(self.machine, self.threads)
        self.measured_s = 0.0
        self._say = say
        self._path = _path(folder or _cache_folder(), self.identity)
        self._kept = {} if fresh else _read(self._path, self.identity)
        self._pool: _core.Pool | None = None
        self._busy: float | None = None

    @property
    def oldest(self) -> float | None:
        """Seconds since 1970 of the first measurement that is kept."""
        return min((entry["time"] for entry in self._kept.values()), default=None)

    @property
    def busy(self) -> float:
        """Share of the CPUs that others used when the busiest of what is kept was measured."""
        return max((entry["busy"] for entry in self._kept.values()), default=0.0)

    def read_gbps(self, seconds: float = 0.3) -> float:
        gigabytes = min(max(0.25, 4 * self.machine.l3_bytes / 1e9), 4.0, self.machine.available_bytes / 4e9)
        return self._once(
            "read", lambda: _core.measure_read_bandwidth(self._workers(), gigabytes, seconds), "memory bandwidth"
        )

    def node_read_gbps(self, seconds: float = 0.3) -> dict[int, float]:
        if len(self.machine.nodes) == 1:
            return {self.machine.nodes[0].id: self.read_gbps(seconds)}
        return {node.id: self._node_read_gbps(node.id, seconds) for node in self.machine.nodes}

    def peaks(self, seconds: float = 0.5) -> dict[str, float]:
        def measure() -> dict[str, float]:
            each = seconds / len(PEAK_UNITS)
            found = {unit: _core.measure_peak(self._workers(), unit, each) for unit in PEAK_UNITS}
            return {unit: peak for unit, peak in found.items() if peak is not None}

        return self._once("peaks", measure, "arithmetic")

    def products(
        self,
        weight_format: str,
        hidden: int = USUAL_HIDDEN,
        intermediate: int = USUAL_INTERMEDIATE,
        seconds: float = 0.5,
    ) -> Products:
        name = f"products {weight_format} {hidden} {intermediate}"
        kept = self._once(
            name,
            lambda: asdict(measure_products(self._workers(), weight_format, hidden, intermediate, seconds)),
            f"products in {weight_format}",
        )
        return _products(kept)

    def linears(self, weight_format: str, matrices: tuple[Matrix, ...], seconds: float = 0.5) -> Products:
        """Of matrices [rows, columns] that are multiplied one after the other."""

        def measure() -> dict:
            pool = self._workers()
            return asdict(measure_linears(pool, weight_format, matrices, measure_linear_call_us(pool), seconds))

        kept = self._once(f"linears {weight_format} {matrices}", measure, f"linears in {weight_format}")
        return _products(kept)

    def decode_overhead(self, heads: Heads, seconds: float = 0.4) -> DecodeOverhead:
        name = f"decode {heads}"
        kept = self._once(
            name, lambda: asdict(measure_decode_overhead(self._workers(), heads, seconds)), "barriers and attention"
        )
        return DecodeOverhead(**kept)

    def torch_layer(self, hidden: int, heads: Heads, value_dim: int, seconds: float = 0.6) -> TorchLayer:
        _load_torch()
        name = f"torch {hidden} {heads} {value_dim}"
        kept = self._once(
            name,
            lambda: asdict(measure_torch_layer(self.threads, hidden, heads, value_dim, seconds)),
            "the other operations of a layer",
        )
        return TorchLayer(**kept)

    def sampling_us(self, vocabulary: int, seconds: float = 0.05) -> float:
        """From a row of logits to a token, as the embedded engine does it."""
        _load_torch()
        return self._once(f"sampling {vocabulary}", lambda: measure_sampling_us(vocabulary, seconds), "sampling")

    def disk_gbps(self, folder: Path, seconds: float = 0.5) -> float | None:
        """Of the disk where a folder is, past the page cache; None where it cannot be measured."""
        place = disk_speed.existing(folder)
        return self._once(
            f"disk {os.stat(place).st_dev}",
            lambda: disk_speed.measure_disk_gbps(folder, seconds),
            f"the disk of {place}",
        )

    def _node_read_gbps(self, node: int, seconds: float) -> float:
        def measure() -> float:
            share = max(1, self.threads // len(self.machine.nodes))
            pool = _pool(min(share, len(next(n.cpus for n in self.machine.nodes if n.id == node))), [node])
            return _core.measure_read_bandwidth(pool, 1.0, seconds)

        return self._once(f"read of node {node}", measure, f"memory bandwidth of node {node}")

    def _workers(self) -> "_core.Pool":
        if self._pool is None:
            self._pool = _pool(self.threads, None)
        return self._pool

    def _once(self, name: str, measure: Callable[[], object], what: str) -> object:
        if not self._is_usable(name):
            self._say(what)
            busy = self._busy_now()
            start = time.perf_counter()
            value = measure()
            self.measured_s += time.perf_counter() - start
            self._kept[name] = {"time": time.time(), "busy": busy, "value": value}
            cached_json.write(self._path, {"identity": self.identity, "measured": self._kept})
        return self._kept[name]["value"]

    def _is_usable(self, name: str) -> bool:
        if name not in self._kept:
            return False
        busy = self._kept[name]["busy"]
        return busy <= QUIET or self._busy_now() > busy / 2

    def _busy_now(self) -> float:
        """Looked at once, before anything of ours runs."""
        if self._busy is None:
            self._busy = system.busy_share(0.2)
        return self._busy


def probe(
    seconds: float = 8.0, *, threads: int | None = None, fresh: bool = False, say: Say = lambda line: None
) -> Rates:
    """Everything about the machine that does not depend on a model, in about `seconds`."""
    kit = Probe(threads=threads, fresh=fresh, say=say)
    each = seconds / _SHARES / 2  # half of the time makes what is measured
    return Rates(
        threads=kit.threads,
        read_gbps=kit.read_gbps(2 * each),
        node_read_gbps=kit.node_read_gbps(each),
        peaks=kit.peaks(len(PEAK_UNITS) * each),
        products={name: kit.products(name, seconds=2 * each) for name in FORMATS},
        disk_gbps=kit.disk_gbps(_cache_folder(), each),
    )


def _load_torch() -> None:
    """Takes seconds, which are not of a measurement. How its threads wait is read then: as open_engine has it."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch  # noqa: F401


def _products(kept: dict) -> Products:
    return Products(tuple((int(rows), float(s)) for rows, s in kept["points"]), kept["pack_seconds"])


def _cache_folder() -> Path:
    from kt_kernel.folders import cache_folder

    return cache_folder()


def _pool(threads: int, nodes: list[int] | None) -> "_core.Pool":
    plan = plan_pool(threads, None, nodes)
    return _core.Pool(list(plan.threads), list(plan.numa_ids), [list(cpus) for cpus in plan.cpus])


def _identity(found: Machine, threads: int) -> dict:
    return {
        "schema": SCHEMA,
        "version": kt_kernel.__version__,
        "cpu": found.cpu,
        "variant": found.variant,
        "cpus": [list(node.cpus) for node in found.nodes],
        "quota": found.cpu_quota,
        "memory_bytes": found.memory_bytes,
        "threads": threads,
    }


def _path(folder: Path, identity: dict) -> Path:
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "probe" / f"{name}.json"


def _read(path: Path, identity: dict) -> dict:
    """Nothing where the file is missing, damaged or of another machine: it is measured again then."""
    content = cached_json.read(path)
    kept = content.get("measured")
    if content.get("identity") != identity or not isinstance(kept, dict):
        return {}
    return {name: entry for name, entry in kept.items() if isinstance(entry, dict) and entry.keys() >= _ENTRY}
