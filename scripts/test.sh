#!/usr/bin/env bash
# Everything CI runs, part by part, with the minutes of each. All parts run even when one fails, except that nothing is
# tested that does not build. With CI=true a warning is an error and a test that could not run is a failure.
#   test.sh [part...]     all parts, or only those named
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

cargo=${CARGO:-cargo}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
rows=()
failed=0

# A part is a name and a command; the command's output goes to the terminal and to the log that is searched at the end.
part() {
  local name=$1 started=$SECONDS result took
  shift
  if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return 0; fi
  echo "== $name"
  if "$@" 2>&1 | tee -a "$log"; then
    result=ok
  else
    result=FAILED
    failed=1
  fi
  took=$((SECONDS - started))
  rows+=("$(printf '%-12s %5d.%d min  %s' "$name" $((took / 60)) $((took % 60 * 10 / 60)) "$result")")
  [ "$result" = ok ]
}

report() {
  local not_run
  # What failed comes last, where the long output of everything else cannot hide it.
  if [ "$failed" -ne 0 ]; then
    echo
    echo "== failures"
    grep -a -A 12 -E '^test .* FAILED$|panicked at |^error(\[|:)|^warning: unused' "$log" | cut -c1-1000 | head -n 120
  fi
  echo
  echo "== minutes"
  printf '%s\n' "${rows[@]}"
  printf '%-12s %5d.%d min\n' total $((SECONDS / 60)) $((SECONDS % 60 * 10 / 60))
  grep -a '^UNSTEADY: ' "$log" | sort -u
  # What could not run is said once more where it cannot be overlooked.
  not_run=$(grep -ao 'NOT RUN: .*' "$log" | sort -u)
  if [ -n "$not_run" ]; then
    echo
    echo "$not_run"
    if [ "${CI:-}" = true ]; then
      echo "in CI a test that could not run is a failure"
      failed=1
    fi
  fi
  exit "$failed"
}

format() {
  # The fuzz targets are a workspace of their own.
  "$cargo" fmt --all --check && "$cargo" fmt --manifest-path fuzz/Cargo.toml --check
}

# Built here and not by the first test that asks, so that its minutes are its own. Without it those tests say NOT RUN.
control_plane() {
  local part
  for part in control-plane kubelet; do
    scripts/kubernetes.sh "$part" || [ $? -eq 3 ] || return 1
  done
  scripts/volcano.sh || [ $? -eq 3 ]
}

# As the control plane, for the chart's tests.
helm() {
  scripts/helm.sh || [ $? -eq 3 ]
}

# The same for the cloud that replacement is tested on.
cloud() {
  scripts/cloud.sh || [ $? -eq 3 ]
}

# The same for the second generation of Slurm; the first comes with the system's packages.
slurm() {
  scripts/slurm.sh || [ $? -eq 3 ]
}

# The dashboard in a browser; without one it says NOT RUN.
browser() {
  scripts/browser.sh || [ $? -eq 3 ]
}

# The API against its own description; without schemathesis it says NOT RUN.
api() {
  scripts/api.sh || [ $? -eq 3 ]
}

# The same for the dstack server.
dstack() {
  scripts/dstack.sh || [ $? -eq 3 ]
}

# The same for Azure's command line.
azure() {
  scripts/azure.sh || [ $? -eq 3 ]
}

deny() {
  if ! command -v cargo-deny >/dev/null; then
    echo "cargo-deny is not installed: licences, bans and sources were not checked (cargo install cargo-deny --locked)"
    return 0
  fi
  # Advisories need the network.
  "$cargo" deny --all-features check licenses bans sources
}

shell() {
  if ! command -v shellcheck >/dev/null; then
    echo "shellcheck is not installed: only the syntax of the scripts was checked"
    local script
    for script in scripts/*.sh deploy/image/*.sh crates/bed/src/kubernetes/real/*.sh crates/bed/src/slurm/*.sh crates/bed/src/dstack/*.sh crates/bed/src/azure/*.sh deploy/azure/node/*.sh .ci/run; do bash -n "$script" || return 1; done
    return 0
  fi
  shellcheck --severity=warning scripts/*.sh deploy/image/*.sh crates/bed/src/kubernetes/real/*.sh crates/bed/src/slurm/*.sh crates/bed/src/dstack/*.sh crates/bed/src/azure/*.sh deploy/azure/node/*.sh .ci/run
}

wanted=("$@")
part system scripts/system.sh
part kubernetes control_plane
part helm helm
part cloud cloud
part slurm slurm
part dstack dstack
part azure azure
part format format
part rules scripts/house-rules.sh
part shell shell
part lint scripts/lint.sh
part build "$cargo" build --workspace --all-features --all-targets --quiet || report
part tests scripts/suite.sh
# With the features of the whole, here and below: with others everything would be built once more.
part scenarios "$cargo" test --workspace --all-features --quiet --test scenarios
part api api
part browser browser
part kill scripts/kill.sh
part fuzz scripts/fuzz.sh 5
part generated env DOCTOR="${CARGO_TARGET_DIR:-target}/debug/doctor" scripts/generated.sh check
part kernels scripts/kernels.sh check
part portable scripts/portable.sh check
part deny deny
report
