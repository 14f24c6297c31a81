"""Threads and sub-pools on machines other than this one."""

from types import SimpleNamespace

import pytest

from kt_kernel.runtime import plan_pool, plan_subpools


def machine(*nodes: tuple[int, int], first_id: int = 0) -> SimpleNamespace:
    """(physical cores, CPUs) of each node; CPUs are numbered through."""
    made, next_cpu = [], 0
    for number, (cores, cpus) in enumerate(nodes):
        numbers = list(range(next_cpu, next_cpu + cpus))
        node = {"id": first_id + number, "memory_id": first_id + number, "cpus": numbers, "physical_cores": cores}
        made.append(SimpleNamespace(**node))
        next_cpu += cpus
    return SimpleNamespace(nodes=made, cpus=next_cpu)


TWO_NODES = machine((4, 8), (4, 8))


def test_the_default_is_a_thread_for_each_core_and_a_subpool_for_each_node():
    plan = plan_pool(None, None, None, TWO_NODES)
    assert (plan.threads, plan.numa_ids) == ((4, 4), (0, 1))
    assert plan.cpus == ((0, 1, 2, 3), (8, 9, 10, 11))


@pytest.mark.parametrize(
    ("threads", "subpools", "sizes"),
    [(7, 2, (4, 3)), (2, 2, (1, 1)), (9, 4, (3, 2, 2, 2)), (6, 1, (6,)), (5, None, (3, 2))],
)
def test_threads_are_spread_evenly(threads, subpools, sizes):
    assert plan_pool(threads, subpools, None, TWO_NODES).threads == sizes


def test_more_subpools_than_nodes_share_nodes_but_not_cpus():
    plan = plan_pool(8, 4, None, TWO_NODES)
    assert plan.numa_ids == (0, 1, 0, 1)
    assert plan.cpus == ((0, 1), (8, 9), (2, 3), (10, 11))


def test_named_nodes():
    plan = plan_pool(4, None, [1, 1], TWO_NODES)
    assert (plan.threads, plan.numa_ids, plan.cpus) == ((2, 2), (1, 1), ((8, 9), (10, 11)))
    plan = plan_pool(None, None, [1], TWO_NODES)
    assert (plan.threads, plan.numa_ids) == ((4,), (1,))


def test_nodes_need_not_start_at_0():
    plan = plan_pool(None, 2, None, machine((2, 2), (2, 2), first_id=6))
    assert plan.numa_ids == (6, 7)


@pytest.mark.parametrize(("subpools", "most"), [(1, 8), (2, 16)])
def test_threads_beyond_the_cpus_are_left_out(subpools, most, capfd):
    plan = plan_pool(40 + subpools, subpools, None, TWO_NODES)
    assert sum(plan.threads) == most
    assert f"using {most}" in capfd.readouterr().err


def test_beside_a_gpu_one_cpu_is_left(capfd):
    one_node = machine((4, 4))
    assert plan_pool(None, None, None, one_node, beside_gpu=True).threads == (3,)
    assert capfd.readouterr().err == ""  # nobody asked for four
    assert plan_pool(4, None, None, one_node, beside_gpu=True).threads == (3,)
    assert "using 3" in capfd.readouterr().err
    assert plan_pool(None, None, None, TWO_NODES, beside_gpu=True).threads == (4, 4)  # there are CPUs to spare
    assert plan_pool(4, None, [1], machine((4, 4), (4, 4)), beside_gpu=True).threads == (4,)


def test_more_subpools_than_cpus():
    """Those without a CPU of their own float."""
    plan = plan_pool(4, 4, None, machine((2, 2)))
    assert plan.threads == (1, 1, 1, 1)
    assert plan.cpus == ((0,), (1,), (), ())
    assert plan_pool(None, 3, None, machine((2, 2))).threads == (1, 1, 1)


def test_subpools_of_given_sizes():
    plan = plan_subpools([3, 1], [1, 0], TWO_NODES)
    assert (plan.threads, plan.numa_ids, plan.cpus) == ((3, 1), (1, 0), ((8, 9, 10), (0,)))
    with pytest.raises(ValueError, match="no CPUs on"):
        plan_subpools([1], [2], TWO_NODES)
