"""A wrapper in a forked child says what to do, one made there works, and the parent's goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() on this system")

PREAMBLE = """
import os, sys
from kt_kernel import KTMoEWrapper
from kt_kernel.kt_kernel_ext import CPUInfer
from wrapper_cases import batch, loaded, make, same_bits, tensors

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
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def printed_by(code: str) -> list[str]:
    """A child that waits for a thread it does not have runs into the time limit."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PREAMBLE + code]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def test_what_a_child_inherits_says_what_to_do():
    code = """
wrapper, waiting, tokens = loaded(), loaded(layer_idx=1), batch()
cpu_infer = wrapper.cpu_infer
expected = wrapper.forward(*tokens)
waiting.submit_forward(*tokens)

def child():
    print(error_of(lambda: wrapper.forward(*tokens)))
    print(error_of(lambda: waiting.sync_forward(tokens[0])))
    print(error_of(lambda: wrapper.load_weights_from_tensors(*tensors())))
    print(error_of(lambda: cpu_infer.sync()))

in_child(child)
assert same_bits(wrapper.forward(*tokens), expected)
waiting.sync_forward(tokens[0])
"""
    lines = printed_by(code)
    assert len(lines) == 4
    for line in lines:
        assert line.startswith("RuntimeError: this ")
        assert line.endswith(" was made before fork(); make a new one in this process, or start the process with spawn")


def test_a_child_makes_its_own():
    code = """
wrapper, tokens = loaded(weight_path="/same", max_deferred_experts_per_token=1), batch()
expected = wrapper.forward(*tokens)

def child():
    global wrapper
    KTMoEWrapper.clear_buffer_cache()
    own = loaded(weight_path="/same", max_deferred_experts_per_token=1)
    print(same_bits(own.forward(*tokens), expected))
    del wrapper  # the old one can go
    print(same_bits(own.forward(*tokens), expected))
    CPUInfer(2).sync()

in_child(child)
print(same_bits(wrapper.forward(*tokens), expected))
"""
    assert printed_by(code) == ["True"] * 3


def test_a_load_in_a_child_does_not_wait_for_tasks_that_nobody_runs():
    code = """
wrapper, tokens = loaded(), batch(tokens=40)
cpu_infer = wrapper.cpu_infer
for _ in range(20):
    wrapper.submit_forward(*tokens)
in_child(lambda: print(error_of(lambda: cpu_infer.submit(lambda: wrapper.load_weights_from_tensors(*tensors())))))
wrapper.sync_forward(tokens[0])
"""
    (line,) = printed_by(code)
    assert "RuntimeError" in line


def test_a_fork_while_a_call_runs():
    code = """
wrapper, tokens = loaded(), batch(tokens=40)
expected = wrapper.forward(*tokens)
for _ in range(10):
    wrapper.submit_forward(*tokens)
    in_child(lambda: print(same_bits(loaded().forward(*tokens), expected)))
    assert same_bits(wrapper.sync_forward(tokens[0]), expected)
"""
    assert printed_by(code) == ["True"] * 10
