#!/usr/bin/env bash
# Builds a layer of the node image from NVIDIA's package repository, in a temporary Debian 12 container.
#   nvidia.sh dcgm OUT           dcgmi and nv-hostengine
#   nvidia.sh nccl-tests OUT     libnccl.so.2, and all_reduce_perf in /opt/nccl-tests/build
#
# NVIDIA_REPOSITORY is a mirror, or the repository of another architecture; the versions below can be set likewise.
set -euo pipefail

repository=${NVIDIA_REPOSITORY:-https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64}
keyring=${NVIDIA_KEYRING:-cuda-keyring_1.1-1_all.deb}
cuda=${CUDA:-12-8}
read -ra dcgm <<<"${DCGM_PACKAGES:-datacenter-gpu-manager-4-core datacenter-gpu-manager-4-cuda12}"
source=${NCCL_TESTS_SOURCE:-https://github.com/NVIDIA/nccl-tests/archive/refs/tags/v2.17.1.tar.gz}
[ $# -eq 2 ] || { sed -n '3,4s/^# *//p' "$0" >&2 && exit 2; }
out=$2

bring() { apt-get install --yes --quiet --no-install-recommends "$@"; }

# Installs NVIDIA's key and the list of its repository.
open_repository() {
  bring ca-certificates curl
  curl --fail --silent --show-error --location --output /tmp/keyring.deb "$repository/$keyring"
  dpkg --install /tmp/keyring.deb
  apt-get update
}

add_dcgm() {
  local folder archive
  folder=$(mktemp -d)
  (cd "$folder" && apt-get -o APT::Sandbox::User=root download "${dcgm[@]}")
  for archive in "$folder"/*.deb; do dpkg-deb --extract "$archive" "$out"; done
}

add_nccl_tests() {
  local libraries
  libraries=usr/lib/$(uname -m)-linux-gnu
  bring make g++ "cuda-nvcc-$cuda" "cuda-cudart-dev-$cuda" libnccl2 libnccl-dev
  mkdir -p /tmp/nccl-tests "$out/$libraries"
  curl --fail --silent --show-error --location "$source" | tar --extract --gzip --directory /tmp/nccl-tests --strip-components=1
  make --directory /tmp/nccl-tests "CUDA_HOME=/usr/local/cuda-${cuda/-/.}"
  install -D -t "$out/opt/nccl-tests/build" /tmp/nccl-tests/build/all_reduce_perf
  cp -a /"$libraries"/libnccl.so.2* "/usr/local/cuda-${cuda/-/.}"/targets/*/lib/libcudart.so.* "$out/$libraries"
}

case $1 in
dcgm)
  open_repository
  add_dcgm
  ;;
nccl-tests)
  open_repository
  add_nccl_tests
  ;;
*) sed -n '3,4s/^# *//p' "$0" >&2 && exit 2 ;;
esac
