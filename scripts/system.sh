#!/usr/bin/env bash
# Brings what the tests need from outside Cargo: compilers of C (SQLite and zstd are built from source) and C++ (the
# fuzzer is), and PostgreSQL's programs, which the test set-up starts by itself in a temporary directory. No system service
# is started. fio is what the storage test runs, and bindfs serves a mount for it that stops answering; perftest and libfabric's
# programs are what the fabric test runs, and without an adapter they still show what they say and how they fail. pip brings the
# compiler that the GPU kernels were made with, to see that they are what their sources give. qemu-user and a C library for it
# run the node's program as it is built for aarch64. containerd, runc and the plugins for networks of containers are what a real
# node of Kubernetes is made of, beside the kubelet, which scripts/kubernetes.sh builds. munge and Slurm's daemons are what tests of
# Slurm stand on; mmdebstrap makes the root file system that the second generation of Slurm lives in (scripts/slurm.sh).
# sshd is what the hosts of a fleet without a scheduler run. promtool, of Prometheus' package, reads our metrics and rules; an
# Alertmanager and a mail server are receivers of messages. cloud-init and systemd check what machines in Azure and small sites are
# given. openssl makes certificates for the API, and curl asks it over TLS. Chromium and Node.js are what the dashboard is looked at
# with. shellcheck reads our scripts.
#
# What is there already is left alone. Without root nothing is installed: what is missing is named, the tests that
# need it say NOT RUN, and in CI that is a failure.
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
# What a host of dstack's is set up with, and what stands in for its daemons there.
[ -x /usr/bin/curl ] || missing+=(curl)
[ -x /usr/bin/python3 ] || missing+=(python3)
command -v cloud-init >/dev/null || missing+=(cloud-init)
command -v systemd-analyze >/dev/null || missing+=(systemd)
command -v shellcheck >/dev/null || missing+=(shellcheck)

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
