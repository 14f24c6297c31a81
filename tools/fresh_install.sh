#!/usr/bin/env bash
# Tries what README.md promises as a newcomer would: a new user, an empty home, no caches, and on PATH only what the system
# has. Prints each step with its time and stops at the first that fails; docs/install.md shows a run.
#
#   tools/fresh_install.sh            make run, a wheel in an empty environment, kt
#   tools/fresh_install.sh --tests    and make test (20 minutes on 2 cores)
#
# As root it makes the user kt-newcomer and removes it again; as anybody else it takes a new home and an empty environment.
# Variables that must pass (proxies, PIP_INDEX_URL) are those in PASS, separated by spaces.
set -euo pipefail
source_tree="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
user=kt-newcomer
tests=0
[[ "${1:-}" != --tests ]] || tests=1

if [[ "$(id -u)" == 0 ]]; then
  useradd --create-home --shell /bin/bash "$user"
  home="$(getent passwd "$user" | cut -d: -f6)"
  trap 'pkill -KILL -u "$user" || true; userdel --remove "$user" 2>/dev/null' EXIT
  as=(runuser -u "$user" --)
else
  home="$(mktemp -d)"
  trap 'rm -rf "$home"' EXIT
  as=()
fi

passed=()
for name in ${PASS:-}; do
  passed+=("$name=${!name-}")
done

# newcomer SCRIPT: in the clone, with nothing of the caller's environment.
newcomer() {
  "${as[@]}" env -i HOME="$home" PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 "${passed[@]}" \
    bash -euo pipefail -c "cd ~; [[ ! -d kt-kernel ]] || cd kt-kernel; $1"
}

step() {
  echo "== $1"
  local begin=$SECONDS
  newcomer "$2"
  echo "   ($((SECONDS - begin)) s)"
}

git -C "$source_tree" bundle create --quiet "$home/source.bundle" HEAD
chmod a+r "$home/source.bundle"

step "what is here" 'python3 --version; make --version | head -1; c++ --version | head -1; ls -A'
step "git clone" 'git -c advice.detachedHead=false clone --quiet source.bundle kt-kernel'
step "make run, then one question" '
  make run > ~/run.log 2>&1 & server=$!
  until grep -q "^ *try " ~/run.log; do kill -0 $server || { tail -20 ~/run.log; exit 1; }; sleep 1; done
  grep -A3 " is up" ~/run.log
  address=$(sed -n "s/^ *API *//p" ~/run.log)
  python3 - "$address" <<PYTHON
import json, sys, urllib.request
body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 24, "temperature": 0}
request = urllib.request.Request(
    sys.argv[1] + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
print("   answer:", json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
PYTHON
  pkill -INT -P $server; wait $server || true'
step "make wheel" 'make --silent wheel; ls dist'
step "pip install into an empty environment" '
  python3 -m venv ~/empty
  ~/empty/bin/pip install --quiet --constraint constraints.txt dist/*.whl'
step "kt version, and the package" 'cd ~; empty/bin/kt version
  empty/bin/python -c "import kt_kernel; print(kt_kernel.__cpu_variant__); from kt_kernel import KTMoEWrapper"'
[[ "$tests" == 0 ]] || step "make test" 'make --silent test'
echo "== everything worked"
