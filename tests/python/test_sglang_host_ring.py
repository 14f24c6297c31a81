"""The ring that experts go through to the GPUs of all ranks: one process, and two that share memory."""

import ctypes
import multiprocessing
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the ring was not tested")

from kt_kernel.integrations.sglang import host_ring  # noqa: E402
from kt_kernel.integrations.sglang.host_ring import PARTS, HostRing  # noqa: E402

CPU = torch.device("cpu")
SIZES = [(700, 3, 512, 0), (600, 9, 256, 1)]  # of two ranks


def content(expert: int, rank: int, part: int, size: int) -> list[int]:
    return [(expert * 31 + rank * 7 + part * 3 + place) % 251 for place in range(size)]


class Writer:
    """Fills slots as the CPU's kernels do, as late as it may."""

    def __init__(self, ring: HostRing, sizes):
        self._ring, self._sizes, self.under_way = ring, sizes, {}

    def write(self, expert: int, slot: int) -> None:
        assert slot not in self.under_way
        self.under_way[slot] = expert

    def wait(self, newer: int) -> None:
        for slot in list(self.under_way)[: len(self.under_way) - newer]:
            expert = self.under_way.pop(slot)
            for part in range(PARTS):
                for rank, address in enumerate(self._ring.addresses(slot, part)):
                    if size := self._sizes[rank][part]:
                        memory = (ctypes.c_uint8 * size).from_address(address)
                        memory[:] = content(expert, rank, part, size)


class Reader:
    """Copies when it is waited for, as late as a GPU may."""

    def __init__(self, ring: HostRing):
        self._ring, self.got = ring, {}

    def __call__(self, expert: int, slot: int):
        def end():
            self.got[expert] = [self._ring.part(slot, part).tolist() for part in range(PARTS)]

        return end

    def finish(self) -> None:
        for end in self._ring._ends.values():
            end()


@pytest.mark.parametrize("experts", [0, 1, 3, 4, 11])
def test_one_rank(experts):
    ring = HostRing(SIZES[:1], 0, 4, CPU)
    writer, reader = Writer(ring, SIZES[:1]), Reader(ring)
    for start in (0, 100):  # twice: slots go on where they were
        ring.stream(None, range(start, start + experts), writer.write, writer.wait, reader)
    reader.finish()
    for expert in [*range(experts), *range(100, 100 + experts)]:
        assert reader.got[expert] == [content(expert, 0, part, SIZES[0][part]) for part in range(PARTS)]


def test_what_was_begun_goes_on_or_is_passed_over():
    ring = HostRing(SIZES[:1], 0, 4, CPU)
    writer, reader = Writer(ring, SIZES[:1]), Reader(ring)
    ring.stream(None, range(3), writer.write, writer.wait, reader)
    ring.begin(None, range(10, 16), writer.write)
    assert len(writer.under_way) == 2
    ring.stream(None, range(10, 16), writer.write, writer.wait, reader)
    ring.begin(None, range(20, 26), writer.write)  # the call that it is for does not come
    ring.stream(None, range(30, 35), writer.write, writer.wait, reader)
    ring.begin("another", range(40, 41), writer.write)
    ring.stream(None, range(40, 41), writer.write, writer.wait, reader)
    reader.finish()
    assert sorted(reader.got) == [0, 1, 2, *range(10, 16), *range(30, 35), 40]
    for expert, parts in reader.got.items():
        assert parts == [content(expert, 0, part, SIZES[0][part]) for part in range(PARTS)]


def test_parts_do_not_touch():
    ring = HostRing(SIZES[1:], 0, 2, CPU)
    spans = sorted(
        (address, address + SIZES[1][part])
        for s in (0, 1)
        for part in range(PARTS)
        for address in ring.addresses(s, part)
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert all(begin % 64 == 0 for begin, _ in spans)


def exchange_by(pipe, rank: int):
    """Between two processes."""

    def exchange(value):
        pipe.send(value)
        other = pipe.recv()
        return [value, other] if rank == 0 else [other, value]

    return exchange


def second_rank(pipe, mode: str) -> None:
    """`mode`: "copy", or "stop" before anything is copied."""
    host_ring.WAIT_SECONDS = 20
    ring = HostRing(SIZES, 1, 2, CPU, exchange_by(pipe, 1))
    if mode == "stop":
        pipe.recv()
        return
    reader = Reader(ring)
    try:
        ring.stream(None, range(9), None, None, reader)
        ring.begin(None, range(9), None)
        ring.stream(None, range(9), None, None, reader)
        reader.finish()
        pipe.send(reader.got)
    except RuntimeError as error:
        pipe.send(str(error))


@pytest.fixture
def peer():
    """(mode) -> the pipe to another process, and its id."""
    context = multiprocessing.get_context("spawn")
    started = []

    def start(mode: str):
        here, there = context.Pipe()
        process = context.Process(target=second_rank, args=(there, mode))
        process.start()
        there.close()
        started.append(process)
        return here, process.pid

    yield start
    for process in started:
        process.join(20)
        process.kill()


def test_two_ranks_get_their_parts(peer):
    pipe, _ = peer("copy")
    ring = HostRing(SIZES, 0, 2, CPU, exchange_by(pipe, 0))
    writer, reader = Writer(ring, SIZES), Reader(ring)
    ring.stream(None, range(9), writer.write, writer.wait, reader)
    ring.begin(None, range(9), writer.write)
    ring.stream(None, range(9), writer.write, writer.wait, reader)
    reader.finish()
    for rank, got in enumerate((reader.got, pipe.recv())):
        for expert in range(9):
            assert got[expert] == [content(expert, rank, part, SIZES[rank][part]) for part in range(PARTS)]


def test_ranks_on_several_machines_share_nothing():
    def exchange(value):
        return [value, (*value[:3], ("pid:[1]", "another machine"))]

    with pytest.raises(RuntimeError, match="ranks are on several machines"):
        HostRing(SIZES, 0, 2, CPU, exchange)


def test_a_rank_whose_memory_cannot_be_mapped():
    def exchange(value):
        return [value, (2**22 + 5, *value[1:])] if isinstance(value, tuple) else [value, ""]

    with pytest.raises(RuntimeError, match=r"cannot be mapped: .*No such file or directory"):
        HostRing(SIZES, 0, 2, CPU, exchange)


def test_an_error_of_the_writer_reaches_the_others(peer):
    pipe, _ = peer("copy")
    ring = HostRing(SIZES, 0, 2, CPU, exchange_by(pipe, 0))

    def fail(expert: int, slot: int) -> None:
        raise ValueError("expert 0 has no weights")

    with pytest.raises(ValueError, match="expert 0 has no weights"):
        ring.stream(None, range(9), fail, lambda _: None, Reader(ring))
    assert pipe.recv() == "rank 0 could not write an expert; its log says why"


def test_a_rank_that_is_gone_is_waited_for_only_so_long(peer, monkeypatch):
    monkeypatch.setattr(host_ring, "WAIT_SECONDS", 0.3)
    pipe, pid = peer("stop")
    before = set(Path("/dev/shm").iterdir())
    ring = HostRing(SIZES, 0, 2, CPU, exchange_by(pipe, 0))
    os.kill(pid, signal.SIGKILL)
    writer = Writer(ring, SIZES)
    with pytest.raises(TimeoutError, match="for rank 1, which copies experts: it is at 0 and not at 1"):
        ring.stream(None, range(9), writer.write, writer.wait, Reader(ring))
    assert set(Path("/dev/shm").iterdir()) <= before
