#!/usr/bin/env bash
# Brings what the tests need from outside Cargo: compilers of C (SQLite and zstd are built from source) and C++ (the
# fuzzer is), and PostgreSQL's programs, which the test set-up starts by itself in a temporary directory. No system service
# is started. fio is what the storage test runs, and bindfs serves a mount for it that stops answering; perftest and libfabric's
# programs are what the fabric test runs, and without an adapter they still show what they say and how they fail. pip brings the
# compiler that the GPU kernels were made with, to see that they are what their sources give. qemu-user and a C library for it
# run the node's program as it is built for aarch64.
#
# What is there already is left alone. Without root nothing is installed: what is missing is named, the tests that
# need it say NOT RUN, and in CI that is a failure.
set -euo pipefail

missing=()
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v c++ >/dev/null || missing+=(g++)
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || command -v initdb >/dev/null || missing+=(postgresql)
python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
command -v fio >/dev/null || missing+=(fio)
command -v bindfs >/dev/null || missing+=(bindfs)
command -v ib_write_bw >/dev/null || missing+=(perftest)
command -v fi_pingpong >/dev/null || missing+=(libfabric-bin)
command -v mkfs.ext4 >/dev/null || missing+=(e2fsprogs)
command -v objdump >/dev/null || missing+=(binutils)
command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
[ -e /usr/aarch64-linux-gnu/lib/libc.so.6 ] || missing+=(libc6-arm64-cross)

if [ ${#missing[@]} -eq 0 ]; then
  echo "all there"
  exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "missing: ${missing[*]}. On Debian or Ubuntu: sudo apt-get install ${missing[*]}"
  exit 0
fi

# Debian starts a server when it installs one, unless policy-rc.d forbids it.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi

install() {
  apt-get -o DPkg::Lock::Timeout=300 -qq update &&
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq install -y --no-install-recommends "${missing[@]}"
}

# Two apt-get at once break each other beyond what dpkg's own lock prevents, hence one lock around all of it.
exec 9>/var/lock/cluster-doctor-apt.lock
flock 9
echo "installing: ${missing[*]}"
install >/dev/null || { echo "installing failed once, trying again"; sleep 5; install >/dev/null; }
