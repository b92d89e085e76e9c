#!/usr/bin/env bash
# One host of the test bed: an sshd with its own processes, devices, home, boot id and load, on a loopback address.
#
#   host.sh keep FOLDER NAME PROGRAMS
#                                prints "ready" on standard output, and runs until its standard input ends
#   host.sh try                  checks that this machine allows it; the last line is the reason if not
#
# All processes started over SSH are in one PID namespace. Its first process waits for the end of its input, which comes even
# if the process at the other end is killed; all others end with it.
set -euo pipefail

what=$1 folder=${2:-} name=${3:-} programs=${4:-}

# /dev/null's device numbers stand for a GPU: only which process holds it open matters.
devices() {
  local dev=$folder/dev
  mkdir -p "$dev/pts"
  mount -t tmpfs -o mode=755 tmpfs "$dev"
  mkdir "$dev/pts" "$dev/shm"
  mknod -m 666 "$dev/null" c 1 3
  mknod -m 666 "$dev/zero" c 1 5
  mknod -m 666 "$dev/random" c 1 8
  mknod -m 666 "$dev/urandom" c 1 9
  mknod -m 666 "$dev/tty" c 5 0
  mknod -m 666 "$dev/nvidia0" c 1 3
  mount -t devpts -o newinstance,ptmxmode=666 devpts "$dev/pts"
  ln -s pts/ptmx "$dev/ptmx"
  ln -s /proc/self/fd "$dev/fd"
  mount --move "$dev" /dev
}

# A private home. Programs built in the developer's home directory stay visible at their path.
home() {
  if [[ $programs != /root/* ]]; then
    mount --bind "$folder/home" /root
    return
  fi
  mkdir -p "$folder/programs" "$folder/home${programs#/root}"
  mount --bind "$programs" "$folder/programs"
  mount --bind "$folder/home" /root
  mount --move "$folder/programs" "$programs"
}

case $what in
keep)
  trap '' INT HUP TERM
  unshare --pid --fork --mount --uts --propagation private --kill-child "$BASH" "$0" inside "$folder" "$name" "$programs" || true
  ;;
inside)
  hostname "$name"
  mount -t proc proc /proc
  mount --bind "$folder/boot_id" /proc/sys/kernel/random/boot_id
  mount --bind "$folder/loadavg" /proc/loadavg
  home
  mount -t tmpfs -o mode=755 tmpfs /run
  mkdir /run/sshd
  # Private folders, if the host has them. The others are shared with this machine.
  for own in opt usr/local/bin var/log; do
    if [ -d "$folder/root/$own" ]; then mount --bind "$folder/root/$own" "/$own"; fi
  done
  devices
  /usr/sbin/sshd -D -f "$folder/sshd_config" -E "$folder/sshd.log" </dev/null &
  echo ready
  # bash reaps every orphaned process, also while it waits for input.
  while read -r _; do :; done
  ;;
try)
  if ! said=$(unshare --pid --fork --mount --uts --propagation private mount -t proc proc /proc 2>&1); then
    echo "creating namespaces is not permitted here: $said" >&2
    exit 3
  fi
  ;;
esac
