# shellcheck shell=bash
# Shared by the test scripts: sourced, never run.

# find_python: the interpreter to make environments with: $PYTHON, or the first Python 3.11+ on the path.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  echo "error: no Python 3.11 or newer on the path; name one with PYTHON=/path/to/python3" >&2
  return 1
}

# make_venv DIR: a virtual environment in DIR; kept if it works, made anew if its interpreter has gone.
make_venv() {
  local dir=$1 python
  if [ -x "$dir/bin/python" ] && "$dir/bin/python" -c 'import pip' 2>/dev/null; then
    return 0
  fi
  if [ -e "$dir" ] && [ ! -e "$dir/pyvenv.cfg" ] && [ -n "$(ls -A -I .lock "$dir")" ]; then
    echo "error: $dir exists and is no virtual environment" >&2
    return 1
  fi
  python=$(find_python)
  # Debian ships ensurepip in a package of its own.
  if ! "$python" -c 'import ensurepip' 2>/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get update -qq && apt-get install -y -qq python3-venv
  fi
  "$python" -m venv --clear "$dir"
}

# content_hash PYTHON FILE…: one hash over the files, the Python version and the machine type.
content_hash() {
  local python=$1
  shift
  { cat -- "$@" && "$python" -VV && uname -m; } | sha256sum | cut -d ' ' -f 1
}

# hold_lock FILE: wait until no other process of ours holds FILE; it is let go when this script ends.
hold_lock() {
  if command -v flock >/dev/null 2>&1; then
    exec 9>"$1"
    flock 9
  fi
}

# timed NAME COMMAND…: run COMMAND and print how long it took. Under `set -e` a failure ends the script, and says so.
timed_name=''
timed() {
  local started=$SECONDS
  timed_name=$1
  shift
  echo "──── $timed_name"
  "$@"
  echo "──── $timed_name: ok, $((SECONDS - started)) s"
  timed_name=''
}
report_failed_step() {
  [ -z "$timed_name" ] || echo "──── $timed_name: FAILED" >&2
}
trap report_failed_step EXIT
