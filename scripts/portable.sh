#!/usr/bin/env bash
# Builds doctor-node for all machines of a cluster: x86-64 and aarch64 (GB200), for glibc 2.28 (RHEL 8) or newer. It is linked
# dynamically, because a static program cannot load the GPU driver.
#   portable.sh dist          both, as shipped, into target/portable
#   portable.sh programs      doctor and doctor-node as shipped, into target/portable/x86_64 and …/aarch64: what packages contain
#   portable.sh check         a quick aarch64 build, and what can be tested of it under qemu-user
# zig, which includes the headers of every glibc, and cargo-zigbuild come from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."

zig_version=0.15.2
zigbuild_version=0.23.4
glibc=2.28
cargo=${CARGO:-cargo}
node=(-p doctor-node --bin doctor-node)
tools=${DOCTOR_TOOLS_CACHE:-$HOME/.cache/cluster-doctor-tools}/zig-$zig_version-$zigbuild_version

if ! [ -d "$tools/ziglang" ]; then
  rm -rf "$tools.new"
  mkdir -p "$tools.new"
  python3 -m pip --quiet install --root-user-action=ignore --disable-pip-version-check --no-deps --target "$tools.new" \
    "ziglang==$zig_version" "cargo-zigbuild==$zigbuild_version"
  rm -rf "$tools"
  mv "$tools.new" "$tools"
fi
export PATH="$tools/bin:$PATH" PYTHONPATH="$tools"
export CARGO_ZIGBUILD_ZIG_PATH="$tools/ziglang/zig"

# Builds programs for one architecture with a profile; prints the folder that they are in.
build() { # processor, profile, arguments of Cargo
  local target=$1-unknown-linux-gnu profile=$2
  shift 2
  if ! rustc --print target-libdir --target "$target" | xargs test -d; then
    rustup --quiet target add "$target" >&2
  fi
  "$cargo" zigbuild --quiet "$@" --profile "$profile" --target "$target.$glibc" >&2
  echo "${CARGO_TARGET_DIR:-target}/$target/${profile/#dev/debug}"
}

# Checks that the newest glibc version that a program needs is not newer than ours.
needs_at_most() {
  local newest
  newest=$(objdump -T "$1" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
  if [ "$(printf '%s\n' "$newest" "GLIBC_$glibc" | sort -V | tail -1)" != "GLIBC_$glibc" ]; then
    echo "$1 needs $newest" >&2
    return 1
  fi
  echo "$(basename "$(dirname "$(dirname "$1")")") ${1##*/}: needs $newest, $(stat -c %s "$1") bytes"
}

# Tests what runs on any machine: the version, checks of this machine, and the search for the GPU driver. The test is started
# directly, as the program starts it as a child process, because qemu-user alone does not follow a program that does that.
smoke() {
  local out code
  out=$("$@" --version)
  case $out in "doctor-node "*) ;; *) echo "unexpected output: $out" >&2; return 1 ;; esac
  code=0
  out=$("$@" check --json memory disk-space kernel-log gpu-count) || code=$?
  if [ "$code" -gt 2 ] && [ "$code" -ne 3 ]; then
    echo "check ended with $code: $out" >&2
    return 1
  fi
  python3 -c 'import json, sys; rows = json.load(sys.stdin); assert len({row["check"] for row in rows}) == 4, rows' <<<"$out"
  out=$("$@" __test dl --heat=0s 2>/dev/null)
  if ! grep -q -e 'libcuda.so.1 cannot be loaded' -e '"text"' <<<"$out"; then
    echo "unexpected output of the GPU test: $out" >&2
    return 1
  fi
  echo "runs: version, check, test"
}

emulated() {
  local missing=()
  command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
  [ -e /usr/aarch64-linux-gnu/lib/libc.so.6 ] || missing+=(libc6-arm64-cross)
  if [ ${#missing[@]} -gt 0 ]; then
    echo "NOT RUN: doctor-node on aarch64: needs ${missing[*]}"
    return 0
  fi
  smoke qemu-aarch64-static -L /usr/aarch64-linux-gnu "$1"
}

case ${1:-} in
dist)
  mkdir -p target/portable
  for processor in x86_64 aarch64; do
    program=$(build "$processor" dist "${node[@]}")/doctor-node
    needs_at_most "$program"
    cp "$program" "target/portable/doctor-node-$processor"
  done
  smoke target/portable/doctor-node-x86_64
  emulated target/portable/doctor-node-aarch64
  ;;
programs)
  for processor in x86_64 aarch64; do
    folder=$(build "$processor" dist "${node[@]}" -p doctor --bin doctor --features doctor/kubernetes)
    mkdir -p "target/portable/$processor"
    for program in doctor doctor-node; do
      needs_at_most "$folder/$program"
      cp "$folder/$program" "target/portable/$processor/"
    done
  done
  ;;
check)
  # Its own target folder: cargo keeps a folder locked while it builds, and the tests need theirs meanwhile.
  export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/portable-check
  program=$(build aarch64 dev "${node[@]}")/doctor-node
  needs_at_most "$program"
  emulated "$program"
  ;;
*)
  echo "usage: portable.sh dist|programs|check" >&2
  exit 2
  ;;
esac
