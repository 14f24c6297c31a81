"""install.sh: what it asks pip for, with a python3 that writes it down; and which rows cmake makes of it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = [path for path in ("install.sh", "CMakeLists.txt", "cmake/isa.cmake") if not (ROOT / path).exists()]
pytestmark = pytest.mark.skipif(bool(NEEDED), reason=f"no source tree here: {', '.join(NEEDED)} missing")

# Answers the version check and the import as python3 would; of pip's call it keeps the arguments.
PYTHON = """#!/bin/sh
case "$*" in
  *"pip install --help"*) echo "$PIP_HELP" ;;
  *"pip --version"*) echo "pip 9.0 from somewhere" ;;
  *"pip install"*) printf '%s\\n' "$CMAKE_BUILD_PARALLEL_LEVEL" "$@" > "$RECORD" ;;
  *"import kt_kernel"*) echo kt-kernel ;;
esac
"""


@pytest.fixture
def install(tmp_path):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    record = tmp_path / "record"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CPUINFER_") and name != "PYTHON"}
    clean |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "RECORD": str(record), "PIP_HELP": "--config-settings"}

    def run(*arguments, **variables):
        record.unlink(missing_ok=True)
        done = subprocess.run(
            [ROOT / "install.sh", *arguments], env=clean | variables, capture_output=True, text=True, timeout=60
        )
        return done, record.read_text().splitlines() if record.exists() else None

    return run


def defines(pip):
    return dict(word.rsplit("=", 1) for word in pip if word.startswith("--config-settings=cmake.define."))


def test_the_default_is_the_distribution_build(install):
    done, pip = install("build")
    assert done.returncode == 0, done.stderr
    assert defines(pip) == {}
    assert "--config-settings=cmake.build-type=Release" in pip


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CPUINFER_CPU_INSTRUCT": "NATIVE"}, {"KT_ISAS": "native"}),
        ({"CPUINFER_CPU_INSTRUCT": "NATIVE", "CPUINFER_ENABLE_AMX": "ON"}, {"KT_ISAS": "native"}),
        ({"CPUINFER_CPU_INSTRUCT": "AVX2"}, {"KT_ISAS": "avx2"}),
        ({"CPUINFER_CPU_INSTRUCT": "AVX512"}, {"KT_ISAS": "avx512_base;avx2"}),
        (
            {"CPUINFER_CPU_INSTRUCT": "FANCY", "CPUINFER_ENABLE_AMX": "on"},
            {"KT_ISAS": "avx512_vnni;avx512_base;avx2", "KT_WITH": "amx_tile"},
        ),
        (
            {"CPUINFER_ENABLE_AMX": "OFF", "CPUINFER_ENABLE_AVX512_BF16": "no", "CPUINFER_ENABLE_AVX512_VNNI": "1"},
            {"KT_WITH": "avx512_vnni", "KT_WITHOUT": "amx_tile;avx512_bf16"},
        ),
    ],
)
def test_variables_restrict_what_is_built(install, variables, expected):
    done, pip = install("build", **variables)
    assert done.returncode == 0, done.stderr
    assert defines(pip) == {f"--config-settings=cmake.define.{name}": value for name, value in expected.items()}


def test_build_type_jobs_and_output(install):
    done, pip = install("--no-clean", CPUINFER_BUILD_TYPE="Debug", CPUINFER_PARALLEL="3", CPUINFER_VERBOSE="1")
    assert done.returncode == 0, done.stderr
    assert pip[0] == "3"
    assert {"--config-settings=cmake.build-type=Debug", "--config-settings=build.verbose=true", "--verbose"} <= set(pip)


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["build"], {"CPUINFER_CPU_INSTRUCT": "SSE"}, "CPUINFER_CPU_INSTRUCT=SSE"),
        (["build"], {"CPUINFER_ENABLE_AMX": "perhaps"}, "CPUINFER_ENABLE_AMX=perhaps"),
        (["build"], {"CPUINFER_BUILD_TYPE": "Fast"}, "CPUINFER_BUILD_TYPE=Fast"),
        (["build", "--manual"], {"CPUINFER_ENABLE_AMX": "ON"}, "--manual needs"),
        (["build"], {"PIP_HELP": ""}, "pip 9.0 is too old"),
        (["--fast"], {}, "unknown argument '--fast'"),
    ],
)
def test_what_is_wrong_is_named(install, arguments, variables, named):
    done, pip = install(*arguments, **variables)
    assert done.returncode == 1
    assert named in done.stderr
    assert pip is None


def test_help(install):
    done, pip = install("--help")
    assert done.returncode == 0
    assert pip is None
    assert set(re.findall(r"CPUINFER_\w+", done.stdout)) == set(
        re.findall(r"CPUINFER_(?:\w+)", (ROOT / "install.sh").read_text())
    ) - {"CPUINFER_ENABLE_"}


@pytest.fixture
def built_rows(tmp_path):
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    # The choice alone, without a compiler: the tables up to the first function that makes targets.
    table = (ROOT / "cmake" / "isa.cmake").read_text().split("# kt_add_isa(")[0]
    script = tmp_path / "choose.cmake"
    script.write_text(table.replace("include(cmake/", f"include({ROOT}/cmake/"))

    def choose(**definitions):
        command = ["cmake", *(f"-D{name}={value}" for name, value in definitions.items()), "-P", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        found = re.search(r"Instruction sets: (.*)", done.stdout + done.stderr)
        return found[1].split(";") if found else " ".join(done.stderr.split())

    return choose


def cpuinfo(tmp_path, flags):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\nprocessor\t: 1\nflags\t\t: fpu {flags}\n")
    return path


AVX2 = "popcnt avx2 fma f16c bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512cd avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        (AVX2, "avx2"),
        (AVX512, "avx512_base"),
        (f"{AVX512} avx512_vnni avx512vbmi avx512_bf16", "avx512_bf16"),
        (f"{AVX512} avx512_vnni avx512vbmi avx512_bf16 amx_tile amx_int8 amx_bf16", "amx"),
    ],
)
def test_native_is_the_best_row_of_the_cpu(tmp_path, built_rows, flags, row):
    assert built_rows(KT_ISAS="native", KT_CPUINFO=cpuinfo(tmp_path, flags)) == [row]


def test_native_obeys_what_is_left_out(tmp_path, built_rows):
    flags = cpuinfo(tmp_path, f"{AVX512} avx512_vnni avx512vbmi avx512_bf16")
    assert built_rows(KT_ISAS="native", KT_WITHOUT="avx512_bf16", KT_CPUINFO=flags) == ["avx512_vbmi"]


def test_rows_stay_in_order(built_rows):
    assert built_rows(KT_ISAS="avx2", KT_WITH="avx512_vnni;amx_tile") == ["amx", "avx512_vnni", "avx2"]
    assert "amx" not in built_rows(KT_WITHOUT="amx_tile")


def test_what_cannot_be_built_is_named(tmp_path, built_rows):
    assert "KT_ISAS names 'sse'" in built_rows(KT_ISAS="sse")
    assert "KT_WITH names 'sse9'" in built_rows(KT_WITH="sse9")
    assert "no instruction set is left" in built_rows(KT_ISAS="avx2", KT_WITHOUT="avx2")
    assert "runs none of" in built_rows(KT_ISAS="native", KT_CPUINFO=cpuinfo(tmp_path, "sse2"))
