#!/usr/bin/env bash
# Clippy with the workspace's lints. Warnings are errors only in CI, so that they do not interrupt work in progress.
set -euo pipefail
cd "$(dirname "$0")/.."

strict=()
[ "${CI:-}" = true ] && strict=(-- -D warnings)
"${CARGO:-cargo}" clippy --workspace --all-features --all-targets --quiet "${strict[@]}"
# The programs as a plain cargo command builds them, without the Kubernetes client.
exec "${CARGO:-cargo}" clippy -p doctor -p doctor-bench --quiet "${strict[@]}"
