#!/usr/bin/env bash
# A Chromium for the browser tests of the HTML report, where there is none and the system can install one.
#
#   tests/chromium.sh
#
# Never fails: without a browser those tests skip themselves, and the last line here says so.
set -uo pipefail
install_seconds=600 # a mirror that does not answer must not hold up the run

have_browser() {
  [ -n "${CHROMIUM:-}" ] && return 0
  for name in chromium chromium-browser chromium-headless-shell google-chrome chrome; do
    command -v "$name" >/dev/null 2>&1 && return 0
  done
  return 1
}

have_browser && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  timeout "$install_seconds" sh -c \
    'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-liberation' \
    >/dev/null 2>&1 || true
fi
have_browser || echo "no Chromium, and none could be installed: the browser tests of the HTML report are skipped" >&2
exit 0
