#!/usr/bin/env bash
# Tests the dashboard in a real browser: Debian's Chromium, driven by Playwright, with an accessibility checker. npm fetches both
# once, and they are kept under DOCTOR_BED_CACHE; `doctor` must be built.
#   browser.sh          the tests
#   browser.sh shots    the tests, and new screenshots in docs/guide/images
#   browser.sh questions [FOLDER]
#                       clicks and seconds until five questions are answered; FOLDER: with the pages of before issue 20, a copy
#                       of crates/api/assets; SHOTS names a folder for screenshots
#   browser.sh paint    how fast ten thousand nodes are painted and respond, as one line of JSON; ADDRESS names a controller that
#                       has them, else DOCTOR simulates them
#
# ASSETS names a copy of crates/api/assets whose pages are used instead of those built into the program.
#
# If this cannot run, the last line is the reason: "NOT RUN: …"; with CI=true that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(playwright-core@1.65.0 axe-core@4.14.0)

cannot() {
  echo "NOT RUN: the dashboard in a browser: $*" >&2
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

CHROMIUM=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || true)}
[ -n "$CHROMIUM" ] || cannot "Chromium is not installed (apt-get install chromium)"
command -v node >/dev/null && command -v npm >/dev/null || cannot "Node.js with npm is not installed (apt-get install nodejs npm)"
DOCTOR=$(realpath -m "${DOCTOR:-${CARGO_TARGET_DIR:-target}/debug/doctor}")
[ -x "$DOCTOR" ] || [ -n "${ADDRESS:-}" ] || cannot "$DOCTOR is not built (cargo build)"

cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
MODULES=$cache/browser-$(printf '%s\n' "${packages[@]}" | sha256sum | cut -c 1-16)
if [ ! -e "$MODULES/whole" ]; then
  mkdir -p "$cache"
  # A concurrent run waits here and finds it done.
  exec 9>"$MODULES.lock"
  flock 9
  if [ ! -e "$MODULES/whole" ]; then
    echo "fetching Playwright and axe: some seconds, once" >&2
    rm -rf "$MODULES"
    mkdir "$MODULES"
    # Playwright's install script would download browsers; Debian's is used instead.
    npm install --prefix "$MODULES" --no-audit --no-fund --ignore-scripts --loglevel error "${packages[@]}" >&2 ||
      { rm -rf "$MODULES"; cannot "Playwright and axe cannot be fetched; see the output of npm above"; }
    touch "$MODULES/whole"
  fi
fi

export CHROMIUM DOCTOR MODULES
here=crates/doctor/tests/browser
case ${1:-tests} in
  tests) exec node --test --test-concurrency=1 "$here/dashboard.test.mjs" ;;
  shots) SHOTS=docs/guide/images exec node --test --test-concurrency=1 "$here/dashboard.test.mjs" ;;
  questions)
    if [ -n "${2:-}" ]; then export BEFORE=1 ASSETS=$2; fi
    exec node "$here/questions.mjs"
    ;;
  paint) exec node "$here/paint.mjs" ;;
  *)
    echo "unknown: $1; accepted: tests, shots, questions, paint" >&2
    exit 2
    ;;
esac
