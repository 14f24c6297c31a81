#!/usr/bin/env bash
# Builds kt-kernel from this folder and installs it into the Python that runs it. See usage below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
  cat <<'TEXT'
Usage: ./install.sh [deps | build | all] [--manual] [--no-clean] [--help]

  deps        the compiler and the headers of Python, by the package manager of the system
  build       build and install with pip
  all         both (default; with options only: build)

  --manual    take the instruction sets from the variables below and nothing else: CPUINFER_CPU_INSTRUCT and
              CPUINFER_ENABLE_AMX must be set
  --no-clean  keep build/, so that only what changed is compiled

Without variables every instruction set is built, and the best one is chosen at import. Variables restrict that:

  CPUINFER_CPU_INSTRUCT         NATIVE (the best of this machine), AVX512, FANCY (AVX512 with VNNI) or AVX2
  CPUINFER_ENABLE_AMX           ON or OFF
  CPUINFER_ENABLE_AVX512_VNNI   ON or OFF
  CPUINFER_ENABLE_AVX512_VBMI   ON or OFF
  CPUINFER_ENABLE_AVX512_BF16   ON or OFF
  CPUINFER_BUILD_TYPE           Release (default), RelWithDebInfo or Debug
  CPUINFER_PARALLEL             jobs (default: every CPU)
  CPUINFER_VERBOSE              1 shows the compiler's commands

PYTHON names another interpreter (default: python3).
TEXT
}

fail() {
  echo "install.sh: $1" >&2
  exit 1
}

# is_on NAME: the value of a switch; whatever is neither on nor off is an error, not a guess.
is_on() {
  case "${!1,,}" in
    1 | on | true | yes | y | enable | enabled) return 0 ;;
    0 | off | false | no | n | disable | disabled) return 1 ;;
    *) fail "$1=${!1} is neither ON nor OFF" ;;
  esac
}

# Sets options: what cmake is told about instruction sets, as arguments of pip.
choose_instruction_sets() {
  local rows="" with="" without="" name
  case "${CPUINFER_CPU_INSTRUCT:-}" in
    "") ;;
    NATIVE) rows="native" ;;
    AVX512) rows="avx512_base;avx2" ;;
    FANCY) rows="avx512_vnni;avx512_base;avx2" ;;
    AVX2) rows="avx2" ;;
    *) fail "CPUINFER_CPU_INSTRUCT=$CPUINFER_CPU_INSTRUCT is not one of NATIVE, AVX512, FANCY, AVX2" ;;
  esac
  for name in AMX AVX512_VNNI AVX512_VBMI AVX512_BF16; do
    local variable="CPUINFER_ENABLE_$name" feature="${name,,}"
    [[ -n "${!variable:-}" ]] || continue
    [[ "$name" == AMX ]] && feature="amx_tile"
    # The best row of this machine has AMX if the machine does; more would not run here.
    if is_on "$variable"; then
      [[ "$rows" == native ]] || with+="${with:+;}$feature"
    else
      without+="${without:+;}$feature"
    fi
  done
  [[ -z "$rows" ]] || options+=("--config-settings=cmake.define.KT_ISAS=$rows")
  [[ -z "$with" ]] || options+=("--config-settings=cmake.define.KT_WITH=$with")
  [[ -z "$without" ]] || options+=("--config-settings=cmake.define.KT_WITHOUT=$without")
}

check_manual() {
  if [[ -z "${CPUINFER_CPU_INSTRUCT:-}" || -z "${CPUINFER_ENABLE_AMX:-}" ]]; then
    usage >&2
    fail "--manual needs CPUINFER_CPU_INSTRUCT and CPUINFER_ENABLE_AMX"
  fi
}

install_deps() {
  local sudo=""
  [[ "$(id -u)" == 0 ]] || sudo="sudo"
  if command -v apt-get >/dev/null; then
    $sudo apt-get update && $sudo apt-get install -y g++ python3-dev python3-pip python3-venv
  elif command -v dnf >/dev/null; then
    $sudo dnf install -y gcc-c++ python3-devel python3-pip
  elif command -v yum >/dev/null; then
    $sudo yum install -y gcc-c++ python3-devel python3-pip
  elif command -v pacman >/dev/null; then
    $sudo pacman -S --needed --noconfirm gcc python python-pip
  elif command -v zypper >/dev/null; then
    $sudo zypper install -y gcc-c++ python3-devel python3-pip
  else
    fail "no package manager found (apt-get, dnf, yum, pacman, zypper): install g++ >= 12 and the headers of Python"
  fi
}

build() {
  local python="${PYTHON:-python3}" options=()
  command -v "$python" >/dev/null || fail "$python not found: set PYTHON, or ./install.sh deps"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$("$python" --version) is too old: 3.10 is needed"
  "$python" -m pip install --help | grep -q -e --config-settings ||
    fail "$("$python" -m pip --version | cut -d " " -f 1-2) is too old: $python -m pip install --upgrade pip"
  choose_instruction_sets
  case "${CPUINFER_BUILD_TYPE:-Release}" in
    Release | RelWithDebInfo | Debug) options+=("--config-settings=cmake.build-type=${CPUINFER_BUILD_TYPE:-Release}") ;;
    *) fail "CPUINFER_BUILD_TYPE=$CPUINFER_BUILD_TYPE is not one of Release, RelWithDebInfo, Debug" ;;
  esac
  if [[ -n "${CPUINFER_VERBOSE:-}" ]] && is_on CPUINFER_VERBOSE; then
    options+=("--config-settings=build.verbose=true" "--verbose")
  fi
  [[ -z "${CPUINFER_PARALLEL:-}" ]] || export CMAKE_BUILD_PARALLEL_LEVEL="$CPUINFER_PARALLEL"
  [[ "$clean" == 0 ]] || rm -rf build/install
  "$python" -m pip install . "--config-settings=build-dir=build/install" "${options[@]}"
  echo "installed: $(cd / && "$python" -c 'import kt_kernel; print("kt-kernel", kt_kernel.__version__, "with", kt_kernel.__cpu_variant__, "kernels")')"
}

action="" clean=1 manual=0
for argument in "$@"; do
  case "$argument" in
    deps | build | all) action="$argument" ;;
    --manual) manual=1 ;;
    --no-clean) clean=0 ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      fail "unknown argument '$argument'"
      ;;
  esac
done
if [[ -z "$action" ]]; then
  [[ $# == 0 ]] && action=all || action=build
fi
[[ "$manual" == 0 ]] || check_manual
[[ "$action" == build ]] || install_deps
[[ "$action" == deps ]] || build
