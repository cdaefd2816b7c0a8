#!/usr/bin/env bash
# Repeat a run until every sample is settled, for a weekend without anybody watching.
#
#   examples/until_done.sh prompts.jsonl --server-type vllm --out prompts.parquet --max-failures 1000
#
# The arguments are those of `managed-cli rollout`. A server that cannot be reached is tried again later, as often as it
# takes; what only a person can mend ends the loop with the run's own exit code.
set -uo pipefail
pause_seconds=${PAUSE_SECONDS:-60}
while :; do
  code=0
  managed-cli rollout "$@" --resume || code=$?
  case $code in
    4) echo "until_done: the server is not to be had; trying again in $pause_seconds s" >&2 ;;
    137) echo "until_done: the run was killed; it goes on" >&2 ;; # out of memory, or kill -9
    *) exit "$code" ;; # 0 all recorded, 3 some failed, 2 5 6 for a person, 130 143 told to stop
  esac
  sleep "$pause_seconds"
done
