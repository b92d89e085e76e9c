#!/usr/bin/env bash
# Fuzzes every parser of external text: a million inputs for each target, two targets at a time, each within its limits of time
# and memory. The stable toolchain and a C++ compiler are enough: the targets are built once, with the coverage counters that
# libFuzzer uses, and run as plain programs.
#   fuzz.sh [seconds] [target...]
#   fuzz.sh build       builds the targets without running them
# Without seconds, a target has half an hour for its million inputs and fails if it does not finish. With seconds, it ends after
# the million or after that time, whichever is first.
#   FUZZ_JOBS=N         run N targets at a time instead of two
#   FUZZ_RUNS=N         another number of inputs than a million
set -euo pipefail
cd "$(dirname "$0")/.."

cargo=${CARGO:-cargo}
enough=${FUZZ_RUNS:-1000000}
seconds=${1:-}
shift || true
only_build=
if [ "$seconds" = build ]; then seconds='' only_build=yes; fi
cap=${seconds:-1800}

targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(cd fuzz/targets && printf '%s\n' *.rs | sed 's/\.rs$//')

# The longest input: about the size of real input, or a multiple of the parser's own limit.
longest() {
  case $1 in
    words) echo 256 ;;
    hostlist | control | api_request) echo 512 ;;
    profile | settings | nhc | measurements | sim | node | spool) echo 2048 ;;
    fio) echo 8192 ;;
    legacy) echo 16384 ;;
    *) echo 4096 ;;
  esac
}

host=$(rustc -vV | sed -n 's/^host: //p')
counters="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
echo "building ${#targets[@]} targets"
# With --target the flags do not apply to build scripts and macros.
RUSTFLAGS="--cfg fuzzing $counters" \
  "$cargo" build --release --quiet --manifest-path fuzz/Cargo.toml --target "$host" "${targets[@]/#/--bin=}"
built=$("$cargo" metadata --format-version 1 --no-deps --manifest-path fuzz/Cargo.toml |
  sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/$host/release

if [ -n "$only_build" ]; then exit 0; fi

# In memory if possible: some targets write files for each input.
logs=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$logs"' EXIT
mkdir "$logs/scratch"

fuzz() { # target; its log and the seconds it took
  local target=$1 began=$SECONDS
  # Seeds are committed and not changed; new inputs go to the ignored corpus.
  mkdir -p "fuzz/corpus/$target" "fuzz/artifacts/$target"
  local seeds=()
  [ -d "fuzz/seeds/$target" ] && seeds=("fuzz/seeds/$target")
  # The log of single inputs would bury the result; a failing input is kept with its trace.
  TMPDIR=$logs/scratch "$built/$target" "fuzz/corpus/$target" "${seeds[@]}" \
    -runs="$enough" -max_total_time="$cap" -max_len="$(longest "$target")" -timeout=10 -rss_limit_mb=1024 \
    -print_final_stats=1 -artifact_prefix="fuzz/artifacts/$target/" >"$logs/$target" 2>&1 || echo failed >"$logs/$target.failed"
  echo $((SECONDS - began)) >"$logs/$target.seconds"
}

stat_of() { # target, name
  sed -n "s/^stat::$2: *//p" "$logs/$1" | tail -n 1
}

running=0
for target in "${targets[@]}"; do
  if [ "$running" -ge "${FUZZ_JOBS:-2}" ]; then
    wait -n
    running=$((running - 1))
  fi
  fuzz "$target" &
  running=$((running + 1))
done
wait

bad=0
printf '%-16s %10s %8s %9s %10s  %s\n' target inputs seconds 'peak MB' 'slowest s' result
for target in "${targets[@]}"; do
  inputs=$(stat_of "$target" number_of_executed_units)
  result=ok
  if [ -e "$logs/$target.failed" ] || [ -z "$inputs" ]; then
    result="FAILED, see fuzz/artifacts/$target"
  elif [ "$inputs" -lt "$enough" ]; then
    result="ended by its time"
    [ -n "$seconds" ] || result="FAILED, too few inputs in $cap s"
  fi
  printf '%-16s %10s %8s %9s %10s  %s\n' "$target" "${inputs:--}" "$(cat "$logs/$target.seconds")" \
    "$(stat_of "$target" peak_rss_mb)" "$(stat_of "$target" slowest_unit_time_sec)" "$result"
  [[ $result != FAILED* ]] || bad=1
done
for failed in "$logs"/*.failed; do
  [ -e "$failed" ] || continue
  echo "== $(basename "$failed" .failed)"
  grep -av '^#[0-9]' "${failed%.failed}" | tail -n 30
done
exit "$bad"
