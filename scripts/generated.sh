#!/usr/bin/env bash
# Pages that the code knows best (checks, exit codes, command line) are written by `doctor docs` and committed.
#   generated.sh check    fails if a committed page differs from what the code says
#   generated.sh write    rewrites them
set -euo pipefail
cd "$(dirname "$0")/.."

doctor() { "${CARGO:-cargo}" run --quiet -p doctor --bin doctor -- "$@"; }

if ! doctor docs --help >/dev/null; then
  echo "this version of doctor has no command \`docs\`: nothing is generated"
  exit 0
fi

case "${1:-check}" in
  check) doctor docs --check || { echo "generated pages differ from the code: run \`make docs\` and commit" >&2; exit 1; } ;;
  write) doctor docs ;;
  *) echo "usage: $0 [check|write]" >&2; exit 2 ;;
esac
