#!/usr/bin/env bash
# Installs what the tests need from outside Cargo; no system service is started. What each is for: compilers for C (SQLite and
# zstd are built from source) and C++ (the fuzzer); PostgreSQL's programs, which the tests start in a temporary directory; fio for
# the storage test, and bindfs for a mount that stops answering; perftest and libfabric's programs for the fabric test, whose
# output and failures can be tested without an adapter; pip for the compiler that verifies the committed GPU kernels; qemu-user
# and a C library to run doctor-node for aarch64; containerd, runc and CNI plugins for a real Kubernetes node, beside the kubelet
# of scripts/kubernetes.sh; munge and Slurm's daemons; mmdebstrap for the root file systems of the second Slurm release
# (scripts/slurm.sh) and of the machines on which our packages are installed (scripts/debian-root.sh); rpm to build and install
# ours; zstd to unpack the stores of releases; sshd for the hosts of a fleet without a scheduler; promtool, from Prometheus'
# package, for our metrics and rules; an Alertmanager and a mail server as receivers of notifications; cloud-init and systemd to
# check the files for Azure machines and small sites; openssl for certificates of the API, and curl for TLS requests; Chromium
# and Node.js for the dashboard; shellcheck for our scripts.
#
# Installed packages are left alone. Without root nothing is installed: the missing packages are listed, the tests that need them
# report NOT RUN, and in CI that is a failure.
set -euo pipefail

missing=()
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v c++ >/dev/null || missing+=(g++)
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || command -v initdb >/dev/null || missing+=(postgresql)
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
command -v fio >/dev/null || missing+=(fio)
command -v bindfs >/dev/null || missing+=(bindfs)
command -v ib_write_bw >/dev/null || missing+=(perftest)
command -v fi_pingpong >/dev/null || missing+=(libfabric-bin)
command -v mkfs.ext4 >/dev/null || missing+=(e2fsprogs)
command -v objdump >/dev/null || missing+=(binutils)
command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
[ -e /usr/aarch64-linux-gnu/lib/libc.so.6 ] || missing+=(libc6-arm64-cross)
command -v containerd >/dev/null || missing+=(containerd)
command -v runc >/dev/null || missing+=(runc)
[ -x /usr/lib/cni/bridge ] || [ -x /opt/cni/bin/bridge ] || missing+=(containernetworking-plugins)
command -v ip >/dev/null || missing+=(iproute2)
command -v munged >/dev/null || missing+=(munge)
command -v slurmctld >/dev/null || missing+=(slurmctld)
command -v slurmd >/dev/null || missing+=(slurmd)
command -v scontrol >/dev/null || missing+=(slurm-client)
command -v slurmrestd >/dev/null || missing+=(slurmrestd)
compgen -G '/usr/lib/*/slurm-wlm/auth_jwt.so' >/dev/null || missing+=(slurm-wlm-jwt-plugin)
command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
command -v rpmbuild >/dev/null || missing+=(rpm)
command -v zstd >/dev/null || missing+=(zstd)
command -v curl >/dev/null || missing+=(curl)
command -v openssl >/dev/null || missing+=(openssl)
[ -x /usr/sbin/sshd ] || missing+=(openssh-server)
command -v ssh >/dev/null || missing+=(openssh-client)
command -v promtool >/dev/null || missing+=(prometheus)
command -v prometheus-alertmanager >/dev/null || missing+=(prometheus-alertmanager)
/usr/bin/python3 -c 'import aiosmtpd' 2>/dev/null || missing+=(python3-aiosmtpd)
command -v chromium >/dev/null || missing+=(chromium fonts-dejavu-core)
command -v node >/dev/null || missing+=(nodejs)
command -v npm >/dev/null || missing+=(npm)
# What a dstack host is set up with, and what the stand-in for its daemons needs.
[ -x /usr/bin/curl ] || missing+=(curl)
[ -x /usr/bin/python3 ] || missing+=(python3)
command -v cloud-init >/dev/null || missing+=(cloud-init)
command -v systemd-analyze >/dev/null || missing+=(systemd)
command -v shellcheck >/dev/null || missing+=(shellcheck)

if [ ${#missing[@]} -eq 0 ]; then
  echo "all packages are installed"
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

# Two concurrent apt-get runs break each other despite dpkg's own lock, hence one lock around all of it.
exec 9>/var/lock/cluster-doctor-apt.lock
flock 9
echo "installing: ${missing[*]}"
install >/dev/null || { echo "installation failed; retrying once"; sleep 5; install >/dev/null; }
