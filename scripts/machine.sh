#!/usr/bin/env bash
# Boots systemd in a copy of a root file system, runs a command there, and ends it with all its processes.
#   machine.sh ROOT SHARED COMMAND...      COMMAND sees the folder SHARED read-only at /shared
#
# The machine is a set of namespaces with systemd as process 1: units are started, sandboxed and stopped as on a real one. It has no
# network but loopback, a file system in memory whose changes are lost, and no limits on memory and processor time: the cgroup is one
# of version 2 without controllers. Needs root. ROOT does not change.
#
# If this cannot run, the last line is the reason: "not run: …", exit 3, or exit 1 with CI=true.
set -euo pipefail

cannot() {
  echo "not run: $*" >&2
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

# Prepares the mounts of a new mount namespace, and becomes systemd.
become_init() { # root, shared, work
  local root=$1 shared=$2 work=$3 device unit
  mount -t tmpfs tmpfs "$work"
  mkdir "$work"/{changes,overlay,root}
  mount -t overlay overlay -o "lowerdir=$root,upperdir=$work/changes,workdir=$work/overlay" "$work/root"
  cd "$work/root"
  mount -t proc proc proc
  # Settings of the kernel are those of the host.
  mount --bind proc/sys proc/sys
  mount -o remount,ro,bind proc/sys
  mount -t sysfs -o ro sysfs sys
  mount -t cgroup2 cgroup2 sys/fs/cgroup
  mount -t tmpfs -o mode=755 tmpfs run
  mount -t tmpfs -o mode=755 tmpfs dev
  mkdir dev/{pts,shm} shared .old
  for device in null zero full random urandom tty; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
  done
  mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
  ln -s pts/ptmx dev/ptmx
  mount -t tmpfs -o mode=1777 tmpfs dev/shm
  mount --bind "$shared" shared
  mount -o remount,ro,bind shared
  echo machine >etc/hostname
  echo 127.0.0.1 localhost machine >etc/hosts
  echo 0123456789abcdef0123456789abcdef >etc/machine-id
  # What is for a kernel, a console or disks of its own.
  for unit in systemd-modules-load systemd-sysctl systemd-remount-fs systemd-firstboot console-getty getty@; do
    ln -sf /dev/null "etc/systemd/system/$unit.service"
  done
  pivot_root . .old
  umount --lazy /.old
  rmdir /.old
  exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=console
}

if [ "${1:-}" = --init ]; then become_init "${@:2}"; fi
[ $# -ge 3 ] || { sed -n '3s/^# *//p' "$0" >&2 && exit 2; }
root=$(realpath "$1") shared=$(realpath "$2")
shift 2
[ "$(id -u)" -eq 0 ] || cannot "a machine with systemd needs root"
hierarchy=$(findmnt --noheadings --output TARGET --types cgroup2 | head -n 1)
[ -n "$hierarchy" ] || cannot "no cgroup file system of version 2 is mounted"

work=$(mktemp -d)
group=$hierarchy/doctor-machine-$$
init=""
end() {
  local tries=0
  [ -z "$init" ] || kill -KILL "$init" 2>/dev/null || true
  [ -z "${keeper:-}" ] || wait "$keeper" 2>/dev/null || true
  # The last processes leave their cgroups a moment after process 1 has died.
  until find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || [ $((tries += 1)) -gt 100 ]; do sleep 0.1; done
  rm -rf "$work"
}
trap end EXIT
mkdir "$work/mount" "$group" || cannot "the cgroup file system at $hierarchy cannot be written"

sh -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' sh "$group" \
  unshare --mount --pid --cgroup --uts --ipc --net --fork --kill-child=KILL --propagation private \
  bash "$0" --init "$root" "$shared" "$work/mount" >"$work/console" 2>&1 &
keeper=$!

enter() {
  nsenter --target "$init" --mount --pid --uts --ipc --net --cgroup --root \
    env -i --chdir=/ PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 "$@"
}

for ((tries = 0; tries < 600; tries++)); do
  init=$(pgrep -P "$keeper" || true)
  if [ -n "$init" ] && state=$(enter systemctl is-system-running --wait 2>/dev/null); then break; fi
  # Before systemd listens, the answer is `offline`, or there is none.
  if [ "${state:-}" = degraded ] || ! kill -0 "$keeper" 2>/dev/null; then break; fi
  sleep 0.1
done
if [ "${state:-}" != running ]; then
  cat "$work/console" >&2
  [ "${state:-}" != degraded ] || enter systemctl --failed --no-pager >&2
  cannot "systemd does not start in namespaces on this machine; its output is above"
fi
enter "$@"
