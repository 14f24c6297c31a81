"""Where prompts are cut, and how memory is shared out."""

import pytest

from kt_kernel.engine import chunks
from kt_kernel.engine.chunks import ChunkPlan, fixed, measure, plan
from kt_kernel.engine.sizes import check_sizes, choose_sizes

GB = 10**9


def cuts(found: ChunkPlan, end: int) -> list[int]:
    at = [0]
    while at[-1] < end:
        at.append(found.next_cut(at[-1]))
    return at


def test_fixed_cuts():
    assert cuts(fixed(8), 30) == [0, 8, 16, 24, 32]
    assert [fixed(8).last_cut(at) for at in (0, 7, 8, 23)] == [0, 0, 8, 16]
    assert fixed(8).next_cut(13) == 16


def test_chunks_get_smaller_where_attention_takes_longer():
    found = plan({32: 0.02, 64: 0.04, 128: 0.08}, seconds_per_pair=1e-6, budget_s=0.2)
    assert found.ranges == ((0, 128), (1024, 64), (2560, 32))
    for position in range(4000):
        last, following = found.last_cut(position), found.next_cut(position)
        assert last <= position < following
        assert found.next_cut(last) == following
        assert following - last in (32, 64, 128)
        size = following - last
        assert size == 32 or {64: 0.04, 128: 0.08}[size] + 1e-6 * size * last <= 0.2


def test_the_smallest_chunk_is_used_where_none_is_fast_enough():
    assert plan({32: 1.0, 64: 2.0}, 1e-6, budget_s=0.2).ranges == ((0, 32),)
    assert plan({32: 0.01, 64: 0.02}, 0.0, budget_s=0.2).next_cut(10**9) == 10**9 + 64 - 10**9 % 64


@pytest.mark.parametrize(("speed", "largest"), [(1e-6, 2048), (1e-3, 128), (1e-1, 32)])
def test_sizes_are_measured(monkeypatch, speed, largest):
    now = 0.0
    monkeypatch.setattr(chunks.time, "perf_counter", lambda: now)
    calls = []

    def prefill(position: int, n: int) -> None:
        nonlocal now
        calls.append((position, n))
        now += n * speed * (1 + position / 8192)

    found = measure(prefill, budget_s=0.2, context=1 << 16)
    assert found.ranges[0] == (0, largest)
    assert found.ranges[-1][1] == 32 or speed < 1e-3
    assert sum(n * speed for _, n in calls) <= max(8 * 0.2, 3 * 32 * speed)  # a slow model is not measured for long


def test_a_moment_of_load_makes_no_chunk_smaller(monkeypatch):
    now, calls = 0.0, 0
    monkeypatch.setattr(chunks.time, "perf_counter", lambda: now)

    def prefill(position: int, n: int) -> None:
        nonlocal now, calls
        calls += 1
        now += n * 1e-3 * (20 if calls % 2 else 1)

    assert measure(prefill, budget_s=0.2, context=1024).ranges[0] == (0, 128)


def test_a_small_context_is_measured_too():
    found = measure(lambda position, n: None, budget_s=0.2, context=20)
    assert found.ranges == ((0, 32),)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # slots, context, of the model, bytes of a token, available bytes
        ((None, None, 8192, 23_000, 20 * GB), (16, 8192)),  # memory is no matter
        ((None, None, 262_144, 98_000, 64 * GB), (9, 36281)),  # about the usual context each
        ((None, None, 262_144, 98_000, 16 * GB), (4, 20408)),  # at least four slots
        ((None, None, 262_144, 98_000, 2 * GB), (2, 5102)),  # but no context that is too short
        ((None, None, 262_144, 98_000, GB // 10), (1, 510)),
        ((8, None, 262_144, 98_000, 16 * GB), (8, 10204)),
        ((None, 100_000, 262_144, 98_000, 64 * GB), (3, 100_000)),
        ((2, 4096, 8192, 98_000, 2 * GB), (2, 4096)),
        ((1, None, 8192, 0, 2 * GB), (1, 8192)),  # a state, and no keys
    ],
)
def test_slots_and_context_follow_from_memory(given, expected):
    assert choose_sizes(*given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0, None, 8192), "slots is 0: it must be at least 1"),
        ((None, -3, 8192), "context is -3: it must be at least 16"),
        ((None, 9000, 8192), "context is 9000: the model was made for 8192 tokens at most"),
    ],
)
def test_sizes_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        check_sizes(*given)


def test_sizes_beyond_the_memory_are_refused():
    with pytest.raises(ValueError, match=r"64 slots of 8192 tokens need 51\.4 GB .* 16\.0 GB are available"):
        choose_sizes(64, 8192, 8192, 98_000, 16 * GB)
