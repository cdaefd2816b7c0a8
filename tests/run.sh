#!/usr/bin/env bash
# All tests that need no real server; the project's environment is made first where it is missing.
#
#   tests/run.sh [PYTEST ARGUMENTS]      e.g. tests/run.sh -x -k tree
#
# The environment: $MANAGED_CLI_TEST_VENV, else .venv-test in the checkout (see tests/venv.sh).
# Tests against real servers: tests/real_servers/run.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${MANAGED_CLI_TEST_VENV:-$root/.venv-test}
[[ $venv = /* ]] || venv=$PWD/$venv

bash "$root/tests/venv.sh" "$venv"
cd "$root"
# Not exported further: a run here never reaches for real servers by accident.
unset MANAGED_CLI_REAL_SERVERS
# Waiting threads of the embedded engine sleep: spinning ones are ten times slower on cores that are shared.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
exec "$venv/bin/python" -m pytest --ignore=tests/real_servers "$@"
