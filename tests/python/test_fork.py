"""A forked child has no workers: what it inherits says so, what it makes itself works, and nothing hangs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() on this system")

PREAMBLE = """
import os, sys, threading
import numpy as np
from kt_kernel import _core
from layer_reference import Case, Shape, random_batch

SHAPE = Shape(experts=3, top_k=2, hidden=64, intermediate=130)

def error_of(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

def in_child(body):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        body()
        return False
    assert os.waitpid(child, 0)[1] == 0
    return True
"""


def printed_by(code: str) -> list[str]:
    """Lines; a child that waits for a thread it does not have runs into the time limit."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PREAMBLE + code]
    here = str(Path(__file__).parent)
    result = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


ERROR = (
    "RuntimeError: this pool was made before fork(); make a new one in this process, or start the process with spawn"
)


@pytest.mark.parametrize("threads", ["(1,)", "(2,)", "(1, 2)"])
def test_what_a_child_inherits_says_what_to_do(threads):
    code = f"""
case = Case(SHAPE, threads={threads})
batch = random_batch(SHAPE, 4)
before = case.run(*batch)
coded = Case(SHAPE, "int8", pool=case.pool)
codes = [[_core.quantise(case.pool, "int8", matrix)] for matrix in case.original[0]]

def child():
    print(error_of(lambda: case.run(*batch)))
    print(error_of(lambda: case.layer.load_expert(0, *case.original[0])))
    print(error_of(lambda: case.layer.fill_random(1)))
    print(error_of(lambda: coded.layer.load_codes(0, *codes)))
    print(error_of(lambda: _core.quantise(case.pool, "int8", case.original[0][0])))
    print(error_of(lambda: Case(SHAPE, pool=case.pool)))
    print(error_of(lambda: _core.measure_read_bandwidth(case.pool, 0.001, 0.001)))

if in_child(child):
    assert np.array_equal(case.run(*batch), before)
"""
    assert printed_by(code) == [ERROR] * 7


def test_a_child_makes_its_own():
    code = """
case = Case(SHAPE, threads=(2,))
batch = random_batch(SHAPE, 4)
before = case.run(*batch)

def child():
    global case
    own = Case(SHAPE, pool=_core.Pool([2]))
    print(np.array_equal(own.run(*batch), before))
    del case  # and the old layer can go while the new one lives
    print(np.array_equal(own.run(*batch), before))
    if not in_child(lambda: print(error_of(lambda: own.run(*batch)))):
        return
    print(np.array_equal(own.run(*batch), before))

in_child(child)
"""
    assert printed_by(code) == ["True", "True", ERROR, "True"]


def test_a_fork_in_the_middle_of_a_forward_leaves_no_lock_behind():
    code = """
case = Case(SHAPE, threads=(2,), max_tokens=4096)
batch = random_batch(SHAPE, 4096)
stop = threading.Event()

def work():
    while not stop.is_set():
        case.run(*batch)

thread = threading.Thread(target=work)
thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        os._exit("before fork()" not in error_of(lambda: case.run(*batch)))
    print(os.waitpid(child, 0)[1])
stop.set()
thread.join()
"""
    assert printed_by(code) == ["0"] * 20
