"""What wrappers of a process share: worker pools with their queues, the sessions of models, leases of CUDA graphs."""

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kt_kernel import _core
from kt_kernel.arguments import whole_number

_POLL_S = 1e-4


@dataclass(frozen=True)
class PoolPlan:
    """Worker threads of each sub-pool, and where they go."""

    threads: tuple[int, ...]
    numa_ids: tuple[int, ...]
    cpus: tuple[tuple[int, ...], ...]


class Runtime:
    """One pool and the queue that feeds it."""

    def __init__(self, plan: PoolPlan):
        self.plan = plan
        self.pool = _core.Pool(list(plan.threads), list(plan.numa_ids), [list(cpus) for cpus in plan.cpus])
        self.queue = _core.Queue(self.pool)
        self._tasks: deque[_core.ForwardTask | _core.WriteSlicesTask] = deque()
        self._process = os.getpid()

    def __del__(self) -> None:
        # A session may keep the queue for longer than this object keeps what its tasks use.
        if getattr(self, "_tasks", None):
            self.wait_until_idle()

    def submit(self, task: "_core.ForwardTask | _core.WriteSlicesTask") -> None:
        """The queue does not own its tasks: they, and so their layers, are kept here until they have run."""
        with _lock:
            self._tasks.append(task)
            self.queue.submit(task)
            for _ in range(len(self._tasks) - self.queue.pending):  # they run in order
                self._tasks.popleft()

    def wait_until_idle(self) -> None:
        """Leaves errors to the next sync. In a forked child nothing would ever be done."""
        while self.queue.pending and os.getpid() == self._process:
            time.sleep(_POLL_S)


class Model:
    """The layers that run one after the other: one session."""

    def __init__(self, runtime: Runtime, hidden_size: int, top_k: int):
        self.runtime = runtime
        self.session = _core.Session(runtime.queue, hidden_size, top_k)
        self.layers: set[int] = set()


_lock = threading.RLock()
_runtimes: "weakref.WeakValueDictionary[PoolPlan, Runtime]" = weakref.WeakValueDictionary()
_models: "weakref.WeakValueDictionary[tuple, Model]" = weakref.WeakValueDictionary()
_every_model: "weakref.WeakSet[Model]" = weakref.WeakSet()
# What graphs use, by lease: kept until the graph is gone.
_captured: dict[int, list[object]] = {}


def plan_pool(
    threads: int | None,
    subpools: int | None,
    numa_nodes: Sequence[int] | None,
    topology: "_core.Topology | None" = None,
    beside_gpu: bool = False,
) -> PoolPlan:
    """Spreads ``threads`` over ``subpools``, each on a NUMA node with CPUs of its own.

    None means: one thread for each physical core, one sub-pool for each node. More sub-pools than nodes share nodes;
    threads beyond the CPUs this process may use are left out, because threads that share a core wait for each other.
    Beside a GPU one CPU is left to the thread that drives it, which spins while it waits: with a worker on every one of
    16 CPUs a call of 0.2 ms took 4 ms, a tick of the scheduler.
    """
    topology = topology or _core.topology()
    nodes = {node.id: node for node in topology.nodes}
    places = _places(nodes, subpools, numa_nodes)
    count = len(places)
    usable = sum(len(nodes[n].cpus) for n in set(places))
    if beside_gpu and usable == topology.cpus:
        usable -= 1
    if threads is None:
        threads = max(count, min(usable, sum(nodes[n].physical_cores for n in set(places))))
    threads = whole_number("cpuinfer_threads", threads, 1)
    if threads < count:
        raise ValueError(f"cpuinfer_threads={threads} cannot be spread over {count} sub-pools; pass {count} or more")
    if threads > max(usable, count):
        spared = " besides one for the thread that drives the GPU" if beside_gpu else ""
        _warn_once(f"cpuinfer_threads={threads}, but this process may use {usable} CPUs there{spared}: using {usable}")
        threads = max(usable, count)
    return _plan(nodes, places, [threads // count + (i < threads % count) for i in range(count)])


def plan_subpools(
    sizes: Sequence[int], numa_nodes: Sequence[int], topology: "_core.Topology | None" = None
) -> PoolPlan:
    """Sub-pools of these sizes on these nodes; of equal sizes if they have more threads than there are CPUs."""
    topology = topology or _core.topology()
    nodes = {node.id: node for node in topology.nodes}
    places = _places(nodes, len(sizes), numa_nodes)
    sizes = [whole_number("threads of a sub-pool", size, 1) for size in sizes]
    if sum(sizes) > sum(len(nodes[n].cpus) for n in set(places)):
        return plan_pool(sum(sizes), len(sizes), numa_nodes, topology)
    return _plan(nodes, places, sizes)


def _places(
    nodes: "dict[int, _core.TopologyNode]", subpools: int | None, numa_nodes: Sequence[int] | None
) -> list[int]:
    """The node of each sub-pool."""
    if subpools is not None:
        subpools = whole_number("threadpool_count", subpools, 1)
    if numa_nodes is None:
        return [list(nodes)[i % len(nodes)] for i in range(subpools or len(nodes))]
    if not isinstance(numa_nodes, Sequence) or isinstance(numa_nodes, str):
        raise TypeError(f"numa_nodes={numa_nodes!r} is a {type(numa_nodes).__name__}; pass a list of nodes, or None")
    places = list(numa_nodes)
    if len(places) != (subpools or len(places)):
        raise ValueError(
            f"numa_nodes={places} has {len(places)} entries; threadpool_count is {subpools}, and they must be equal"
        )
    missing = [n for n in places if n not in nodes]
    if not places:
        raise ValueError("numa_nodes=[]; name the node of each sub-pool, or pass None")
    if missing:
        known = ", ".join(str(n) for n in nodes)
        raise ValueError(f"numa_nodes={places}: this process has no CPUs on {missing}; it has on {known}")
    return places


def _plan(nodes: "dict[int, _core.TopologyNode]", places: list[int], sizes: list[int]) -> PoolPlan:
    taken = dict.fromkeys(places, 0)
    cpus = []
    for place, size in zip(places, sizes, strict=True):
        free = nodes[place].cpus[taken[place] :]
        cpus.append(tuple(free[:size]))
        taken[place] += size
    return PoolPlan(tuple(sizes), tuple(nodes[p].memory_id for p in places), tuple(cpus))


def runtime_for(plan: PoolPlan) -> Runtime:
    with _lock:
        runtime = _runtimes.get(plan)
        if runtime is None:
            runtime = _runtimes[plan] = Runtime(plan)
        return runtime


def model_for(runtime: Runtime, path: str, hidden_size: int, top_k: int, layer_idx: int) -> Model:
    """The session of the model that this layer belongs to.

    Layers with the same weights path and sizes are of one model, until one of them comes a second time: then the model
    is being made again.
    """
    key = (runtime.plan, os.path.realpath(path), hidden_size, top_k)
    with _lock:
        model = _models.get(key)
        if model is None or layer_idx in model.layers:
            model = _models[key] = Model(runtime, hidden_size, top_k)
            _every_model.add(model)
        model.layers.add(layer_idx)
        return model


def keep_for_graph(lease: int, user: object) -> None:
    with _lock:
        _captured.setdefault(lease, []).append(user)


def drop_ended_graphs() -> None:
    """Frees what graphs used that are gone."""
    with _lock:
        for lease in _core.ended_leases():
            for model in list(_every_model):
                model.session.end_lease(lease)
            _captured.pop(lease, None)  # last: the queue may have computed with it until now


def clear_stages(streams_idle: bool) -> None:
    drop_ended_graphs()
    with _lock:
        for model in list(_every_model):
            model.session.clear_stages(streams_idle)


def _after_fork_in_child() -> None:
    """The child has none of the threads; what it makes itself works."""
    global _lock
    _lock = threading.RLock()
    _runtimes.clear()
    _models.clear()
    _every_model.clear()
    _captured.clear()


_warned: set[str] = set()


def _warn_once(line: str) -> None:
    if line not in _warned:
        _warned.add(line)
        print(f"[kt-kernel] {line}", file=sys.stderr)


os.register_at_fork(after_in_child=_after_fork_in_child)
