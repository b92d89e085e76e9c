#!/usr/bin/env bash
# Checks or rewrites the files that `doctor docs` generates and that are committed: reference pages (checks, exit codes, command
# line) and the Helm chart.
#   generated.sh check    fails if a committed file differs from the generated one
#   generated.sh write    rewrites them
set -euo pipefail
cd "$(dirname "$0")/.."

# DOCTOR names an existing build of the program.
doctor() {
  if [ -n "${DOCTOR:-}" ]; then "$DOCTOR" "$@"; else "${CARGO:-cargo}" run --quiet -p doctor --bin doctor -- "$@"; fi
}

if ! doctor docs --help >/dev/null; then
  echo "this version of doctor has no command \`docs\`: nothing is generated"
  exit 0
fi

case "${1:-check}" in
  check) doctor docs --check || { echo "generated files differ from the code: run \`make docs\` and commit" >&2; exit 1; } ;;
  write) doctor docs ;;
  *) echo "usage: $0 [check|write]" >&2; exit 2 ;;
esac
