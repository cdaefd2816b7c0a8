#!/usr/bin/env bash
# Tests against real inference servers, one server after another; everything that is missing is installed first.
#
#   tests/real_servers/run.sh [KIND…]      KIND: vllm, sglang, trl, trl-vllm, llamacpp, local, projects; default: all
#
# Each kind has the two-turn conversations; vllm and local have tests of their own beside them. `projects` is no server:
# the code of trainers reads exported files.
#
#   MANAGED_CLI_SERVERS_VENV   the servers' environment (default: .cache/servers-venv in the checkout)
#   MANAGED_CLI_TEST_VENV      the project's environment (default: .venv-test in the checkout)
#   MANAGED_CLI_REAL_ALL=1     whole data sets instead of their first lines
#   MANAGED_CLI_SERVER_LOGS    where the servers' logs stay (default: .cache/server-logs in the checkout)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
# shellcheck source=tests/lib.sh
. "$root/tests/lib.sh"

# absolute PATH: PATH as seen from the caller's directory.
absolute() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }

declare -A own_tests=(
  [vllm]="test_vllm.py test_restart.py" [local]=test_embedded.py [sglang]='' [trl]='' [trl-vllm]='' [llamacpp]='' [projects]=''
)
[ $# -ge 1 ] || set -- vllm sglang trl trl-vllm llamacpp local projects
for kind in "$@"; do
  if [ -z "${own_tests[$kind]+known}" ]; then
    echo "error: no tests for a server of kind $kind; there are: ${!own_tests[*]}" >&2
    exit 2
  fi
done

servers_venv=$(absolute "${MANAGED_CLI_SERVERS_VENV:-$root/.cache/servers-venv}")
test_venv=$(absolute "${MANAGED_CLI_TEST_VENV:-$root/.venv-test}")
MANAGED_CLI_SERVER_LOGS=$(absolute "${MANAGED_CLI_SERVER_LOGS:-$root/.cache/server-logs}")
export MANAGED_CLI_SERVER_LOGS

timed "project environment" bash "$root/tests/venv.sh" "$test_venv"
timed "servers' environment ($*)" bash "$here/install.sh" "$servers_venv" "$@"
cd "$root"
for kind in "$@"; do
  # pytest itself fails (5) where nothing was collected; tests that all skip themselves are caught by the second line.
  results=$root/.cache/real-$kind.xml
  files=("$here/test_conversations.py")
  if [ "$kind" = projects ]; then files=("$root/tests/export/test_projects.py"); fi
  for own in ${own_tests[$kind]}; do files+=("$here/$own"); done
  timed "tests against $kind" env MANAGED_CLI_REAL_SERVERS="$servers_venv" MANAGED_CLI_REAL_KINDS="$kind" \
    "$test_venv/bin/python" -m pytest -v -raP --durations=0 --durations-min=5 --junitxml="$results" "${files[@]}"
  "$test_venv/bin/python" "$root/tests/ran_some.py" "$results"
done
