"""The whole engine: its scheduler, loader, attention and sampler are SGLang's, the experts but four are ours."""

import os

import checks
import pytest
import rows
import server as http
from engines import Engine
from run import plugin_variables

START_SECONDS = 240
ASK_SECONDS = 120


@pytest.fixture
def start(place, tiny, tmp_path):
    """(row, class, more options) -> the row's engine or server, up; ended afterwards."""
    started = []

    def up(name: str, kind=Engine, **more):
        row = next(row for row in rows.ROWS if row.name == name)
        options = row.engine_options(str(tiny), str(tiny), "cpu") | {"kt_cpuinfer": 2} | more
        # Cores of each rank, where there are several; SGLang wants to be told on a machine with one NUMA node.
        variables = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if more else {}
        engine = kind(place, options, tmp_path / "log", **variables, **plugin_variables(place, "cpu", row))
        started.append(engine)
        engine.wait_until_up(START_SECONDS)
        return engine

    yield up
    for engine in started:
        engine.kill()


def asking(engine: Engine):
    return lambda call, **arguments: engine.call(call, ASK_SECONDS, **arguments)


@pytest.mark.timeout(600)
def test_tokens_are_those_of_float32_alone_and_together(start, reference):
    engine = start("eager")
    assert checks.check_engine(asking(engine), reference, "BF16")["wrong"] == []
    assert checks.check_together(asking(engine), reference)["wrong"] == []


@pytest.mark.timeout(600)
def test_an_expert_that_is_left_out_is_noticed(start, reference):
    found = checks.check_engine(asking(start("dropped expert")), reference, "BF16")
    assert not found["ok"]
    assert found["logprob_mean"] > 2 * checks.LIMITS["BF16"][1]


@pytest.mark.timeout(600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs: parallelism was not run")
@pytest.mark.parametrize("parallel", ["tp_size", "pp_size", "dp_size"])
def test_two_ranks(start, reference, parallel):
    """Of a layer: one has the experts of the CPU. Of a pipeline: each those of its layers. Of replicas: each all."""
    found = checks.check_engine(asking(start("eager", **{parallel: 2})), reference, "BF16")
    assert found["wrong"] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["server, terminated", "server, killed"])
def test_a_server_answers_many_and_leaves_nothing(start, reference, name):
    server = start(name, http.Server)
    assert http.check_requests(server, reference)["wrong"] == []
    number = next(row.ends for row in rows.ROWS if row.name == name)
    assert http.check_end(server, number)["wrong"] == []
