#!/usr/bin/env bash
# The tests of the whole workspace. They start real Kubernetes, Slurm, dstack and databases side by side, and on two cores any
# of those is now and then short of time. So what failed runs once more, alone. What fails again has failed. What passes alone is
# said to be UNSTEADY, by name: a fault of the test or of the program that somebody has to look at, and a failure all the same.
# How much of its time a virtual machine was not given meanwhile (`steal` in /proc/stat) is said beside it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

few=5
cargo=("${CARGO:-cargo}" test --workspace --all-features --no-fail-fast --quiet)
said=$(mktemp)
again=$(mktemp)
trap 'rm -f "$said" "$again"' EXIT

# Ticks that this machine used, and ticks that it would have used and was not given.
ticks() {
  awk '$1 == "cpu" { print $2 + $3 + $4 + $7 + $8, $9 + 0 }' /proc/stat
}

read -r used_before stolen_before < <(ticks)
# --show-output: a test that passes because it could not run says so in its output. Scenarios have a part of their own.
"${cargo[@]}" -- --show-output --skip scenarios_play_as_reviewed 2>&1 | tee "$said" && exit 0

read -r used stolen < <(ticks)
used=$((used - used_before)) stolen=$((stolen - stolen_before))
missing=$((stolen * 100 / (used + stolen + 1)))
echo "the host took $missing % of this machine's time away during these tests"

mapfile -t programs < <(sed -nE 's/^ +`-p [^ ]+ (--.*)`$/\1/p' "$said")
mapfile -t names < <(grep -aoE '[A-Za-z0-9_:]+ --- FAILED$' "$said" | cut -d' ' -f1 | sort -u)
# A program that ended without saying which of its tests failed has failed; so have examples in the documentation.
if [ ${#names[@]} -eq 0 ] || [ ${#names[@]} -gt $few ] || [[ " ${programs[*]} " == *" --doc "* ]] ||
  [ "$(grep -ac '^test result: FAILED' "$said")" -ne ${#programs[@]} ]; then
  exit 1
fi
echo "once more, alone: ${names[*]}"
read -ra chosen <<<"${programs[*]}"
"${cargo[@]}" "${chosen[@]}" -- --show-output --test-threads 1 --exact "${names[@]}" 2>&1 | tee "$again" || exit 1
passed=$(awk '/^test result: ok/ { sum += $4 } END { print sum + 0 }' "$again")
if [ "$passed" -lt ${#names[@]} ]; then
  echo "only $passed of ${#names[@]} could be run once more"
  exit 1
fi
for name in "${names[@]}"; do
  echo "UNSTEADY: $name failed beside others and passed alone, with $missing % of the machine's time taken away"
done
exit 1
