#!/usr/bin/env bash
# One part of a run, as a task of a Slurm array; every task has a server of its own.
#
#   sbatch --array=1-8 examples/array_job.sh prompts.jsonl runs/prompts
#   managed-cli merge runs/prompts/part-*.parquet --out prompts.parquet        once all tasks have ended
#
# Each sample belongs to one part, by its id, so eight tasks cover the input once. A task that is preempted or runs out of
# time is queued again and continues where it was. Further options come from the environment, for example
# MANAGED_CLI_MAX_TOKENS=2048, or stand at the end of the call below.
#
#SBATCH --job-name=rollouts
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@180
set -euo pipefail
prompts=${1:?usage: array_job.sh PROMPTS DIRECTORY}
directory=${2:?usage: array_job.sh PROMPTS DIRECTORY}
part=${SLURM_ARRAY_TASK_ID:-1}
parts=${SLURM_ARRAY_TASK_COUNT:-1}
mkdir -p "$directory"

# A server for this task; MODEL is a name or path that vLLM knows. Without it, one that runs already is used.
if [ -n "${MODEL:-}" ]; then
  port=$((8000 + part))
  vllm serve "$MODEL" --port "$port" > "$directory/server-$part.log" 2>&1 &
  server=$!
  trap 'kill "$server" 2> /dev/null || true' EXIT
  export MANAGED_CLI_SERVER_TYPE=vllm MANAGED_CLI_BASE_URL=http://127.0.0.1:$port MANAGED_CLI_WAIT_FOR_SERVER=900
fi

# Slurm signals this shell; the recorder then finishes what is in flight and ends with 143, which queues the task again.
managed-cli rollout "$prompts" --part "$part/$parts" --seed 1 --out "$directory/part-$part.parquet" --resume &
recorder=$!
trap 'kill -TERM "$recorder" 2> /dev/null || true' TERM
code=0
wait "$recorder" || code=$?
if kill -0 "$recorder" 2> /dev/null; then # the signal ended only the waiting
  code=0
  wait "$recorder" || code=$?
fi
if [ "$code" = 143 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
