#!/usr/bin/env bash
# Benchmarks of the recorder, beside the least that recording can cost and beside other programs.
#
#   tests/bench/run.sh [NAME… | OPTIONS]      e.g. tests/bench/run.sh tokens --kinds vllm --repeats 1
#
# The recorder runs in the tests' environment ($MANAGED_CLI_TEST_VENV, else .venv-test); the programs that it is
# compared with in one of their own, .cache/bench/venv. Where that cannot be made, they are left out.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
# shellcheck source=tests/lib.sh
. tests/lib.sh

peers=(atroposlib==0.4.0 openai transformers)
venv=${MANAGED_CLI_TEST_VENV:-$root/.venv-test}
bash tests/venv.sh "$venv"

others=$root/.cache/bench/venv
mkdir -p "$others"
make_venv "$others"
if [ "$(cat "$others/.installed" 2>/dev/null || true)" != "${peers[*]}" ]; then
  if "$others/bin/python" -m pip install --quiet "${peers[@]}"; then
    echo "${peers[*]}" >"$others/.installed"
  else
    echo "the programs to compare with cannot be installed; only the floor is measured" >&2
    rm -rf "$others"
  fi
fi
exec "$venv/bin/python" -m tests.bench "$@"
