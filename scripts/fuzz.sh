#!/usr/bin/env bash
# Every fuzz target for so many seconds each. Needs a nightly toolchain; cargo-fuzz is installed when it is missing.
#   fuzz.sh [seconds] [target...]
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
shift || true

if ! rustup toolchain list 2>/dev/null | grep -q '^nightly'; then
  echo "fuzzing needs a nightly toolchain: rustup toolchain install nightly --profile minimal" >&2
  exit 1
fi
command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked

targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(cargo +nightly fuzz list)

failed=()
for target in "${targets[@]}"; do
  echo "== $target, ${seconds} s"
  # Seeds are committed and stay as they are; what the fuzzer finds goes to the ignored corpus.
  mkdir -p "fuzz/corpus/$target"
  seeds=()
  [ -d "fuzz/seeds/$target" ] && seeds=("fuzz/seeds/$target")
  [ "$target" = interpret ] && seeds+=(crates/checks/fixtures/*/)
  cargo +nightly fuzz run "$target" "fuzz/corpus/$target" "${seeds[@]}" -- \
    -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 || failed+=("$target")
done

if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}; the inputs are under fuzz/artifacts" >&2
  exit 1
fi
echo "no failure in ${#targets[@]} targets"
