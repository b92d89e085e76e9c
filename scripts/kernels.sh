#!/usr/bin/env bash
# Compiles the GPU kernels: PTX from the CUDA sources in crates/gpu/kernels. The output is committed, so that building Cluster
# Doctor needs no CUDA compiler; this script rewrites it, or checks that it matches the sources.
#   kernels.sh write|check
# The compiler is NVRTC 12.0 from PyPI: every driver since 525 accepts its PTX 8.0.
set -euo pipefail
cd "$(dirname "$0")/.."

nvrtc_version=12.0.140
tools=${DOCTOR_TOOLS_CACHE:-$HOME/.cache/cluster-doctor-tools}/nvrtc-$nvrtc_version

if ! [ -d "$tools/nvidia" ]; then
  mkdir -p "$tools.new"
  python3 -m pip --quiet install --root-user-action=ignore --disable-pip-version-check --no-deps --target "$tools.new" \
    "nvidia-cuda-nvrtc-cu12==$nvrtc_version"
  rm -rf "$tools"
  mv "$tools.new" "$tools"
fi

case ${1:-} in
write)
  python3 scripts/kernels.py "$tools/nvidia/cuda_nvrtc/lib" crates/gpu/kernels
  ;;
check)
  fresh=$(mktemp -d)
  trap 'rm -rf "$fresh"' EXIT
  python3 scripts/kernels.py "$tools/nvidia/cuda_nvrtc/lib" "$fresh"
  for file in "$fresh"/*.ptx; do
    if ! diff -q "$file" "crates/gpu/kernels/$(basename "$file")"; then
      echo "the committed PTX differs from its sources: run scripts/kernels.sh write" >&2
      exit 1
    fi
  done
  echo "the committed PTX matches its sources"
  ;;
*)
  echo "usage: kernels.sh write|check" >&2
  exit 2
  ;;
esac
