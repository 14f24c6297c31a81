"""What `import kt_kernel` does: the choice of an instruction set, and how little else it loads."""

import os
import subprocess
import sys

import pytest

import kt_kernel
from kt_kernel import _core

VARIANTS = {variant.name: variant for variant in _core.variants()}
RUNNABLE = [name for name, variant in VARIANTS.items() if variant.runnable]
REFUSED = [name for name, variant in VARIANTS.items() if not variant.runnable]
SHOW = "import kt_kernel; print(kt_kernel.__cpu_variant__)"


def run(code: str, **variables: str) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KT_KERNEL_")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **variables}, capture_output=True, text=True, check=False
    )


def test_the_best_native_variant_is_the_default():
    best = next(name for name in RUNNABLE if not VARIANTS[name].emulated)
    assert run(SHOW).stdout.strip() == best


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("spelling", [str, str.upper])
def test_a_variant_can_be_forced(name, spelling):
    assert run(SHOW, KT_KERNEL_CPU_VARIANT=spelling(name)).stdout.strip() == name


@pytest.mark.parametrize("name", REFUSED)
def test_a_variant_this_cpu_lacks_is_an_import_error(name):
    result = run(SHOW, KT_KERNEL_CPU_VARIANT=name)
    assert result.returncode == 1  # an exception; a signal would be negative
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: KT_KERNEL_CPU_VARIANT={name}: this CPU lacks ")
    assert "it can run: " in last


def test_an_unknown_variant_is_an_import_error_that_lists_the_known():
    last = run(SHOW, KT_KERNEL_CPU_VARIANT="avx3").stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert all(name in last for name in VARIANTS)


@pytest.mark.parametrize(
    ("before", "value"),
    [
        ("", b"\xff\xfe"),
        ("import sys; sys.modules['kt_kernel._core'] = None;", b""),
        ("import sys; sys.stderr.close();", b"nothing"),
    ],
    ids=["bytes that are no text", "no core", "no stderr"],
)
def test_nothing_but_an_import_error_comes_out(before, value):
    """Engines import the name at their start and guard that error alone."""
    code = f"{before}\ntry:\n  import kt_kernel\nexcept ImportError as error:\n  print(type(error).__name__)"
    result = run(code, KT_KERNEL_CPU_VARIANT=os.fsdecode(value), KT_KERNEL_DEBUG="1")
    assert result.stdout.strip() in {"ImportError", "ModuleNotFoundError"}
    assert result.returncode == 0


@pytest.mark.skipif(not any(name.startswith("avx512_") for name in RUNNABLE), reason="this CPU has no AVX-512")
def test_avx512_is_an_alias_for_the_best():
    best = next(name for name in RUNNABLE if name.startswith("avx512_"))
    assert run(SHOW, KT_KERNEL_CPU_VARIANT="AVX512").stdout.strip() == best


def test_an_empty_variable_counts_as_unset():
    assert run(SHOW, KT_KERNEL_CPU_VARIANT=" ").stdout == run(SHOW).stdout


def test_a_cpu_without_avx2_is_told_of_the_emulated_variant():
    with pytest.raises(ImportError, match=r"AVX2.*KT_KERNEL_CPU_VARIANT=emu"):
        _core.choose_variant(None, features="popcnt")
    assert _core.choose_variant("emu", features="") == "emu"


@pytest.mark.parametrize("name", [name for name in VARIANTS if not VARIANTS[name].emulated])
def test_any_cpu_gets_its_row(name):
    assert _core.choose_variant(None, features=VARIANTS[name].needs) == name


def test_debug_prints_the_detection_on_stderr():
    result = run(SHOW, KT_KERNEL_DEBUG="1")
    lines = result.stderr.splitlines()
    assert all(line.startswith("[kt-kernel] ") for line in lines)
    assert any(line.startswith(f"[kt-kernel] selected {result.stdout.strip()} ") for line in lines)
    assert len(result.stdout.splitlines()) == 1
    assert run(SHOW).stderr == ""


@pytest.mark.parametrize("statement", ["import kt_kernel", "from kt_kernel import KTMoEWrapper"])
def test_import_is_light_and_fast(statement):
    """Engines import the name whether or not they use it."""
    code = (
        f"import sys, time; t = time.process_time(); {statement}; t = time.process_time() - t;"
        "print(t, *({'numpy', 'torch', 'typer', 'rich', 'yaml', 'transformers', 'gguf', 'sglang'} & set(sys.modules)))"
    )
    seconds, *loaded = min((run(code).stdout.split() for _ in range(3)), key=lambda words: float(words[0]))
    assert loaded == []
    assert float(seconds) < 0.2


def test_public_names():
    assert kt_kernel.__version__.count(".") >= 2
    assert set(kt_kernel.__all__) <= set(dir(kt_kernel))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kt_kernel.no_such_name


def test_topology_of_this_process():
    topology = _core.topology()
    assert sorted(cpu for node in topology.nodes for cpu in node.cpus) == sorted(os.sched_getaffinity(0))
    assert 1 <= topology.physical_cores <= topology.cpus
