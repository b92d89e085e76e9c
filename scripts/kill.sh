#!/usr/bin/env bash
# The kill test: kills the controller with SIGKILL at random instants, again and again, against a simulated cluster that runs
# as its own process and keeps its own log of effects. That log and the store must agree afterwards.
# A second mode (DOCTOR_PAIR_MINUTES, half a minute by default) runs two controllers on one store and sends SIGSTOP, SIGCONT and SIGKILL
# to them at random instants: each takeover within two leases, no doubled effect. Only that, for half an hour on each database:
#   DOCTOR_PAIR_MINUTES=30 scripts/kill.sh one_of_two_controllers
# It is not part of `cargo test --workspace` (its target has `test = false`) because it takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

# With the features of the whole workspace, as CI has built it before.
exec "${CARGO:-cargo}" test --quiet --workspace --all-features --test kill -- --nocapture --test-threads 4 "$@"
