"""A ring of host buffers: the CPU writes an expert for every rank, each rank's GPU copies its part away.

Slot s of a rank holds four parts: w13, its scales, w2, its scales. Expert number i of all that ever went through (every
rank counts the same) uses slot i % depth. With one rank the memory is torch's pinned memory. With more, each rank's is
a memfd that the first rank maps too; it has no name in any file system, so nothing is left behind by a kill.

What ranks tell each other are counters in the first rank's memfd, each in a cache line of its own and written by one
process only: how many experts are written, and how many each rank has copied.
"""

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch

PARTS = 4
_ALIGNMENT = 256  # bytes: what GPU copies like
_LINE = 8  # int64 in a cache line
_FAILED = -1
WAIT_SECONDS = 120.0


class HostRing:
    """`part_bytes[r]` are the four sizes for rank r. `exchange(value)` returns the values of all ranks, in order."""

    def __init__(
        self,
        part_bytes: Sequence[Sequence[int]],
        rank: int,
        depth: int,
        device: torch.device,
        exchange: Callable[[object], list] | None = None,
    ):
        self.depth, self.rank, self.ranks = depth, rank, len(part_bytes)
        self._layouts = [_Layout(sizes, depth) for sizes in part_bytes]
        self._passed = 0  # experts that went through
        self._ahead = max(1, depth // 2)
        self._ends: dict[int, Callable[[], None]] = {}  # of copies that nobody has waited for, by number
        self._begun: tuple[object, list[int], int] = (None, [], 0)  # whose experts, which, how many are on the queue
        self._memory: list[torch.Tensor] = []  # of each rank that is mapped here
        self._counters: ctypes.Array | None = None
        own = self._layouts[rank].bytes
        if self.ranks == 1:
            self._memory = [torch.empty(own, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")]
        else:
            self._share(own, device, exchange)
        self._own = self._memory[0 if self.ranks == 1 else rank]

    def part(self, slot: int, part: int) -> torch.Tensor:
        """This rank's bytes of a part."""
        start, size = self._layouts[self.rank].place(slot, part)
        return self._own[start : start + size]

    def addresses(self, slot: int, part: int) -> list[int]:
        """Of all ranks; on the first rank only."""
        return [
            memory.data_ptr() + layout.place(slot, part)[0]
            for memory, layout in zip(self._memory, self._layouts, strict=True)
        ]

    def stream(
        self,
        owner: object,
        experts: Sequence[int],
        write: Callable[[int, int], None] | None,
        wait_written: Callable[[int], None] | None,
        copy: Callable[[int, int], Callable[[], None]],
    ) -> None:
        """Takes all `experts` of `owner` through the ring.

        On the first rank `write(expert, slot)` puts a write on the CPU's queue, and `wait_written(newer)` waits until
        only the newest `newer` of them may be left. `copy(expert, slot)` starts a copy out of the slot and returns what
        waits for its end. Half of the slots wait to be written, so that the CPU never does, the others are copied.
        """
        last = len(experts) - 1
        with self._telling_of_errors(write):
            started = self._take_begun(owner, experts, wait_written)
            for at in range(len(experts) + self._ahead - 1):
                if started <= at <= last:
                    self._start(experts[at], self._passed + at, write)
                done = at - self._ahead + 1
                if not 0 <= done <= last:
                    continue
                number = self._passed + done
                if write is not None:
                    wait_written(min(at, last) - done)
                    self._tell(0, number + 1)
                else:
                    self._wait(0, number + 1)
                self._ends[number] = copy(experts[done], number % self.depth)
        self._passed += len(experts)

    def begin(self, owner: object, experts: Sequence[int], write: Callable[[int, int], None] | None) -> None:
        """Puts the first experts of the next stream() on the queue already."""
        count = min(self._ahead, len(experts))
        with self._telling_of_errors(write):
            for at in range(count):
                self._start(experts[at], self._passed + at, write)
        self._begun = owner, list(experts), count

    def _take_begun(self, owner: object, experts: Sequence[int], wait_written: Callable[[int], None] | None) -> int:
        """How many are on the queue already. What was begun for a call that never came is passed over."""
        (begun_for, begun, count), self._begun = self._begun, (None, [], 0)
        if begun_for is owner and begun == list(experts):
            return count
        if count and wait_written is not None:
            wait_written(0)
        for number in range(self._passed, self._passed + count):
            self._ends[number] = _nothing
        self._passed += count
        return 0

    def _start(self, expert: int, number: int, write: Callable[[int, int], None] | None) -> None:
        self._free(number, write is not None)
        if write is not None:
            write(expert, number % self.depth)

    @contextlib.contextmanager
    def _telling_of_errors(self, write: Callable[[int, int], None] | None) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if write is not None:
                self._tell(0, _FAILED)
            raise

    def _free(self, number: int, is_writer: bool) -> None:
        """Waits until expert `number` may be written: what was in its slot is copied, by every rank."""
        before = number - self.depth
        if before in self._ends:
            self._ends.pop(before)()
            self._tell(1 + self.rank, before + 1)
        if is_writer:
            for rank in range(self.ranks):
                self._wait(1 + rank, before + 1)

    def _tell(self, counter: int, value: int) -> None:
        if self._counters is not None:
            self._counters[counter * _LINE] = value

    def _wait(self, counter: int, value: int) -> None:
        if self._counters is None:
            return
        deadline = None
        while (now := self._counters[counter * _LINE]) < value:
            if self._counters[0] == _FAILED:
                raise RuntimeError("rank 0 could not write an expert; its log says why")
            if deadline is None:
                deadline = time.monotonic() + WAIT_SECONDS
            elif time.monotonic() > deadline:
                who = "rank 0, which writes" if counter == 0 else f"rank {counter - 1}, which copies"
                raise TimeoutError(f"waited {WAIT_SECONDS:.0f} s for {who} experts: it is at {now} and not at {value}")
            time.sleep(20e-6)

    def _share(self, own_bytes: int, device: torch.device, exchange: Callable[[object], list]) -> None:
        control = -(-(1 + self.ranks) * _LINE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("kt-kernel-experts", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, control + own_bytes)
            os.posix_fallocate(fd, 0, control + own_bytes)  # too little memory shows here, not as SIGBUS
            here = os.readlink("/proc/self/ns/pid"), _boot_id()
            peers = exchange((os.getpid(), fd, control + own_bytes, here))
            if any(peer[3] != here for peer in peers):
                raise RuntimeError("ranks are on several machines, or in several PID namespaces: memory is not shared")
            mapped, problem = self._map_all(peers)
            # Nobody closes before everybody has mapped, and all of them go on or none.
            if problem := next(filter(None, exchange(problem)), ""):
                raise RuntimeError(f"memory of another rank cannot be mapped: {problem}")
        finally:
            os.close(fd)
        # The first rank's counters lie before its memory.
        self._counters = (ctypes.c_int64 * ((1 + self.ranks) * _LINE)).from_buffer(mapped[0])
        self._memory = [
            torch.empty(0, dtype=torch.uint8, device="cpu")
            if memory is None
            else torch.frombuffer(memory, dtype=torch.uint8, offset=control)
            for memory in mapped
        ]
        if device.type == "cuda":
            _register(self._memory[self.rank])

    def _map_all(self, peers: list[tuple]) -> tuple[list[mmap.mmap | None], str]:
        """The first rank maps all of them, others the first rank's counters and their own; else why it failed."""
        try:
            wanted = [self.rank == 0 or index in (0, self.rank) for index in range(self.ranks)]
            return [self._map(*peer[:3]) if w else None for peer, w in zip(peers, wanted, strict=True)], ""
        except OSError as error:
            return [], str(error)

    @staticmethod
    def _map(pid: int, fd: int, size: int) -> mmap.mmap:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(opened, size)
        finally:
            os.close(opened)


def _nothing() -> None:
    pass


class _Layout:
    def __init__(self, sizes: Sequence[int], depth: int):
        if len(sizes) != PARTS:
            raise ValueError(f"{len(sizes)} sizes for {PARTS} parts")
        self._sizes = list(sizes)
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self.bytes = self._starts[-1] * depth

    def place(self, slot: int, part: int) -> tuple[int, int]:
        return self._starts[-1] * slot + self._starts[part], self._sizes[part]


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _register(memory: torch.Tensor) -> None:
    """Pins mapped memory for the GPU's copies, until the process ends."""
    result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(result) != 0:
        raise RuntimeError(f"cudaHostRegister of {memory.numel()} bytes failed ({result}); see 'ulimit -l'")
