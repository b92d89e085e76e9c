#!/usr/bin/env bash
# Clippy with the workspace's lints. Warnings are errors in CI only, so that they never stop somebody in mid-thought.
set -euo pipefail
cd "$(dirname "$0")/.."

strict=()
[ "${CI:-}" = true ] && strict=(-- -D warnings)
exec "${CARGO:-cargo}" clippy --workspace --all-features --all-targets --quiet "${strict[@]}"
