"""The names of the older native module that clients touch, over the core: pools, queues, layers on addresses.

Code that is new should use :class:`kt_kernel.KTMoEWrapper`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kt_kernel import _core
from kt_kernel.kt_kernel_ext import kvcache, moe
from kt_kernel.kt_kernel_ext.tasks import Task

if TYPE_CHECKING:
    from kt_kernel.runtime import Runtime

__all__ = ["CPUInfer", "WorkerPoolConfig", "kvcache", "moe"]


@dataclass
class WorkerPoolConfig:
    """Sub-pools: how many, on which NUMA node, with how many threads each."""

    subpool_count: int = 0
    subpool_numa_map: list[int] = field(default_factory=list)
    subpool_thread_count: list[int] = field(default_factory=list)


class CPUInfer:
    """A pool of workers and the queue in front of it."""

    def __init__(self, threads: "int | WorkerPoolConfig"):
        from kt_kernel import runtime

        if isinstance(threads, WorkerPoolConfig):
            count = threads.subpool_count
            if not (count == len(threads.subpool_numa_map) == len(threads.subpool_thread_count)):
                raise ValueError(
                    f"WorkerPoolConfig: subpool_count is {count}, subpool_numa_map has "
                    f"{len(threads.subpool_numa_map)} entries, subpool_thread_count "
                    f"{len(threads.subpool_thread_count)}; all must be equal"
                )
            plan = runtime.plan_subpools(threads.subpool_thread_count, threads.subpool_numa_map)
        else:
            plan = runtime.plan_pool(threads, None, None)
        self._runtime = runtime.runtime_for(plan)

    @classmethod
    def of(cls, runtime: "Runtime") -> "CPUInfer":
        self = cls.__new__(cls)
        self._runtime = runtime
        return self

    @property
    def backend_(self) -> "Runtime":
        """What ``moe.MOEConfig.pool`` takes."""
        return self._runtime

    def submit(self, task: Task) -> None:
        """Puts a task on the queue and returns. Loading is done here, after what was submitted before."""
        if isinstance(task, (_core.ForwardTask, _core.WriteSlicesTask)):
            self._runtime.submit(task)
        else:
            self._runtime.wait_until_idle()
            task()

    def sync(self, allow_n_pending: int = 0) -> None:
        """Waits until at most so many tasks are pending. Raises the first error since the last sync."""
        self._runtime.queue.sync(allow_n_pending)

    def __getattr__(self, name: str) -> object:
        # Clients ask hasattr(cpu_infer, "submit_with_cuda_stream") to learn whether there is CUDA.
        methods = {
            "submit_with_cuda_stream": self._submit_with_cuda_stream,
            "sync_with_cuda_stream": self._sync_with_cuda_stream,
        }
        if name in methods and _core.cuda_missing() is None:
            return methods[name]
        raise AttributeError(f"'CPUInfer' object has no attribute {name!r}")

    def _submit_with_cuda_stream(self, user_cuda_stream: int, task: "_core.ForwardTask") -> None:
        """submit when the stream gets there; in a graph, at every replay."""
        self._runtime.queue.submit_on(user_cuda_stream, task)

    def _sync_with_cuda_stream(self, user_cuda_stream: int, allow_n_pending: int = 0) -> None:
        """Makes the stream wait."""
        self._runtime.queue.sync_on(user_cuda_stream, allow_n_pending)
