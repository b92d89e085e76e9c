#!/usr/bin/env bash
# Runs everything CI runs, part by part, with the minutes of each. All parts run even if one fails, except that nothing is tested
# if the build fails. With CI=true, a warning is an error and a test that could not run is a failure.
#   test.sh [part...]     all parts, or only those named
#   FULL=true             with the repetitions of `make test-full`: more kills, more inputs (CONTRIBUTING.md lists them)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
# Configuration that the group may write to is refused, and tests write configuration.
umask 022

cargo=${CARGO:-cargo}
log=$(mktemp)
aside=$(mktemp -d)
trap 'end_background; rm -rf "$log" "$aside"' EXIT
rows=()
failed=0
declare -A started_beside=() pid_beside=()

# The repetitions: few here, many in `make test-full`.
if [ "${FULL:-}" = true ]; then kills=200 fuzz_seconds=60; else kills=50 fuzz_seconds=3; fi

# Prints the CPU ticks that this machine used, and those that its host withheld (`steal`).
ticks() {
  awk '$1 == "cpu" { print $2 + $3 + $4 + $7 + $8, $9 + 0 }' /proc/stat
}
read -r used_before stolen_before < <(ticks)

is_wanted() {
  [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" $1 "* ]]
}

row() { # name, seconds, result
  rows+=("$(printf '%-12s %5d.%d min  %s' "$1" $(($2 / 60)) $(($2 % 60 * 10 / 60)) "$3")")
}

# Prints the result of a part that did not fail, from its output: a part with skipped checks is incomplete.
whole() {
  local missing
  missing=$(grep -aio 'not run: .*' | sort -u | wc -l)
  if [ "$missing" -gt 0 ]; then echo "INCOMPLETE, $missing not run"; else echo ok; fi
}

# Runs a part: a name and a command, whose output goes to the terminal and to the log that is searched at the end.
part() {
  local name=$1 started=$SECONDS result before
  shift
  is_wanted "$name" || return 0
  echo "== $name"
  before=$(stat -c %s "$log")
  if "$@" 2>&1 | tee -a "$log"; then
    result=ok
  else
    result=FAILED
    failed=1
  fi
  [ "$result" = FAILED ] || result=$(tail -c "+$((before + 1))" "$log" | whole)
  row "$name" $((SECONDS - started)) "$result"
  [ "$result" != FAILED ]
}

# As `part`, in the background: the parts after it compute while it waits, or the reverse. `join` waits for it.
beside() {
  local name=$1
  shift
  is_wanted "$name" || return 0
  echo "== $name: starts in the background"
  started_beside[$name]=$SECONDS
  {
    "$@" >"$aside/$name" 2>&1
    echo $? >"$aside/$name.code"
    echo $SECONDS >"$aside/$name.ended"
  } &
  pid_beside[$name]=$!
}

# Runs a command in a session of its own with low priority. Linux shares processor time among sessions before it looks at the priority
# of processes (`sched_autogroup_enabled`), so the priority of the session is lowered too.
background() {
  # shellcheck disable=SC2016 # the inner shell expands them
  setsid --wait bash -c 'echo 19 2>/dev/null >/proc/self/autogroup; exec nice -n 19 "$@"' background "$@"
}

# Ends what still runs in the background: an interrupt of the terminal does not reach another session.
end_background() {
  local name
  for name in "${!pid_beside[@]}"; do
    [ -e "$aside/$name.ended" ] || end_tree "${pid_beside[$name]}"
  done
}

end_tree() { # pid
  local child
  for child in $(pgrep -P "$1"); do end_tree "$child"; done
  kill "$1" 2>/dev/null
}

# Gives a process and its children normal priority, if this user may.
raise_priority() { # pid
  local child
  renice -n 0 -p "$1" >/dev/null 2>&1 || return 0
  echo 0 2>/dev/null >"/proc/$1/autogroup"
  for child in $(pgrep -P "$1"); do raise_priority "$child"; done
}

join() {
  local name=$1 result
  [ -n "${started_beside[$name]:-}" ] || return 0
  # Everything else has ended, but other programs of the machine may compute: with low priority this part could wait for hours.
  raise_priority "${pid_beside[$name]}"
  until [ -e "$aside/$name.ended" ]; do sleep 1; done
  echo "== $name"
  tee -a "$log" <"$aside/$name"
  if [ "$(<"$aside/$name.code")" -eq 0 ]; then
    result=$(whole <"$aside/$name")
  else
    result=FAILED
    failed=1
  fi
  row "$name" $(($(<"$aside/$name.ended") - started_beside[$name])) "$result (beside others)"
  [ "$result" != FAILED ]
}

report() {
  local not_run
  # Failures are printed last, where other output cannot hide them.
  if [ "$failed" -ne 0 ]; then
    echo
    echo "== failures"
    grep -a -A 12 -E '^test .* FAILED$|^FAILED: |panicked at |^error(\[|:)|^warning: unused' "$log" | cut -c1-1000 | head -n 120
  fi
  echo
  echo "== minutes"
  printf '%s\n' "${rows[@]}"
  printf '%-12s %5d.%d min\n' total $((SECONDS / 60)) $((SECONDS % 60 * 10 / 60))
  local used stolen
  read -r used stolen < <(ticks)
  used=$((used - used_before)) stolen=$((stolen - stolen_before))
  echo "CPU time stolen by the host: $((stolen * 100 / (used + stolen + 1))) %"
  grep -a '^UNSTEADY: ' "$log" | sort -u
  # Skipped tests are listed again where they cannot be overlooked.
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
  # The fuzz targets are a separate workspace.
  "$cargo" fmt --all --check && "$cargo" fmt --manifest-path fuzz/Cargo.toml --check
}

# Built here and not by the first test that needs it, so that its time is listed separately. Without it those tests report NOT RUN.
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

# The same for the fake AWS, on which node replacement is tested.
cloud() {
  scripts/cloud.sh || [ $? -eq 3 ]
}

# The same for the second Slurm release; the first comes with the system's packages.
slurm() {
  scripts/slurm.sh || [ $? -eq 3 ]
}

# The same for the machines on which our packages are installed.
machines() {
  scripts/debian-root.sh bookworm rpm && scripts/debian-root.sh trixie || [ $? -eq 3 ]
}

# The packages, installed, upgraded and removed; without root they report NOT RUN.
packages() {
  scripts/packages-test.sh || [ $? -eq 3 ]
}

# The dashboard in a browser; without one it reports NOT RUN.
browser() {
  scripts/browser.sh || [ $? -eq 3 ]
}

# The API against its own description; without schemathesis it reports NOT RUN.
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

# Checks all scripts with shellcheck.
shell() {
  local scripts
  mapfile -t scripts < <(find scripts deploy crates -name '*.sh' | sort)
  if ! command -v shellcheck >/dev/null; then
    echo "NOT RUN: shell scripts: shellcheck is not installed; scripts/system.sh installs it"
    return 0
  fi
  shellcheck --severity=warning "${scripts[@]}" .ci/run && echo "${#scripts[@]} scripts"
}

wanted=("$@")
part system scripts/system.sh
# These wait for the network while Go compiles.
beside cloud cloud
beside slurm slurm
beside dstack dstack
beside azure azure
beside machines machines
part kubernetes control_plane
part helm helm
for name in cloud slurm dstack azure machines; do join "$name"; done
part format format
part rules scripts/house-rules.sh
part shell shell
part lint scripts/lint.sh
part build "$cargo" build --workspace --all-features --all-targets --quiet || report
# These use the time that the tests leave: the tests wait more than they compute.
beside fuzz-build background scripts/fuzz.sh build
beside portable background scripts/portable.sh check
part tests scripts/suite.py
part api api
part browser browser
part kill env DOCTOR_KILLS="$kills" scripts/kill.sh
join portable
part packages packages
join fuzz-build && part fuzz scripts/fuzz.sh "$fuzz_seconds"
part generated env DOCTOR="${CARGO_TARGET_DIR:-target}/debug/doctor" scripts/generated.sh check
part kernels scripts/kernels.sh check
part deny scripts/deny.py
report
