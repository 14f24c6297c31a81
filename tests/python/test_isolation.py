"""tools/check_isolation.py finds what it is there to find."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_isolation.py"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
TABLE = 'extern "C" [[gnu::visibility("hidden")]] const int* kt_isa_x() { static const int t = 1; return &t; }\n'

spec = importlib.util.spec_from_file_location("check_isolation", TOOL)
check_isolation = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_isolation)


@pytest.fixture
def compile_object(tmp_path):
    def compile_object(code: str, *flags: str) -> Path:
        source, path = tmp_path / "x.cc", tmp_path / "x.o"
        source.write_text(code)
        command = [COMPILER, "-std=c++20", "-O2", "-fPIC", "-march=x86-64", *flags, "-c", source, "-o", path]
        subprocess.run(command, check=True)
        return path

    return compile_object


def isa_problems(path: Path) -> str:
    return "\n".join(check_isolation.isa_object_problems(path, "x"))


def test_a_clean_isa_object_passes(compile_object):
    assert isa_problems(compile_object(TABLE + "namespace { [[maybe_unused]] int hidden() { return 1; } }")) == ""


def test_a_missing_table_is_found(compile_object):
    assert "does not export kt_isa_x" in isa_problems(compile_object("int other;"))


def test_a_second_symbol_is_found(compile_object):
    assert "exports _Z5otherv" in isa_problems(compile_object(TABLE + "int other() { return 2; }"))


def test_a_weak_symbol_is_found(compile_object):
    code = TABLE + "template <class T> [[gnu::noinline]] T twice(T x) { return x + x; }\nstatic auto f = &twice<int>;"
    code += "\nnamespace { [[gnu::used]] int g() { return f(1); } }"
    assert "exports _Z5twiceIiET_S0_" in isa_problems(compile_object(code))


def test_a_static_initialiser_is_found(compile_object):
    code = TABLE + "extern int outside();\nnamespace { [[gnu::used]] int at_start = outside(); }"
    assert "static initialiser" in isa_problems(compile_object(code))


@pytest.mark.parametrize(
    ("code", "flags", "mnemonic"),
    [
        ("typedef float v8 __attribute__((vector_size(32)));\nvoid f(v8* a) { *a += *a; }", ["-mavx2"], "v"),
        ("int f(unsigned x) { return __builtin_popcount(x); }", ["-mpopcnt"], "popcnt"),
        ("unsigned f(unsigned x, unsigned s) { return x << s; }", ["-mbmi2"], "shlx"),
        ("float f(float a) { return __builtin_floorf(a); }", ["-msse4.1"], "roundss"),
        ('void f() { __asm__("kmovw %eax, %k1"); }', [], "kmovw"),
        ('void f() { __asm__("tilezero %tmm0"); }', [], "tilezero"),
    ],
)
def test_an_instruction_above_the_baseline_is_found(compile_object, code, flags, mnemonic):
    (problem,) = check_isolation.baseline_problems(compile_object(code, *flags))
    assert re.search(rf": {mnemonic}\w* in f", problem)


def test_baseline_code_passes(compile_object):
    code = """#include <string>
    int f(unsigned x, std::string& s) { s += "verify"; return __builtin_ctz(x) + __builtin_popcount(x); }
    void g() { __asm__("cpuid; xgetbv; pause" ::: "eax", "ebx", "ecx", "edx"); }"""
    assert list(check_isolation.baseline_problems(compile_object(code))) == []
