#!/usr/bin/env bash
# A PID and mount namespace for the processes of one Slurm, so that the kernel ends everything they started.
#
#   keeper.sh keep FOLDER [ROOT]     prints "ready PID" on standard output, and runs until its standard input ends
#   keeper.sh try                    checks that this machine allows it; the last line is the reason if not
#
# Slurm's daemons leave their parent's session, and their jobs leave theirs, so no list of processes is complete. The first
# process of the namespace waits for the end of its input, which comes even if the process at the other end is killed; all
# others, jobs included, end with it. `keep` waits outside and removes FOLDER.
#
# ROOT is a root file system of another distribution, which the processes see in place of this machine's. Everything else
# (devices, homes, temporary files, FOLDER) is mounted into it at the same path.
set -euo pipefail

what=$1 folder=${2:-} root=${3:-}

# Directories that belong to the distribution. The others are mounted from this machine.
own=' bin boot etc lib lib32 lib64 libx32 lost+found proc sbin usr var '

# User and group ids must match on both sides, because messages and files contain them.
accounts=(etc/passwd etc/group etc/hosts)

show_machine() {
  local directory name file
  for directory in /*/; do
    name=$(basename "$directory")
    if [ -L "${directory%/}" ] || [[ $own == *" $name "* ]]; then continue; fi
    mkdir -p "$root/$name"
    mount --rbind "/$name" "$root/$name"
  done
  for file in "${accounts[@]}"; do
    [ -e "$root/$file" ] || : >"$root/$file"
    mount --bind "/$file" "$root/$file"
  done
}

case $what in
keep)
  # A signal to the writer's process group must not end this process before it has removed the files.
  trap '' INT HUP TERM
  unshare --pid --fork --mount --propagation private --kill-child "$BASH" "$0" inside "$folder" "$root" || true
  # A process that was just killed may still create a file while its folder is removed.
  for ((tries = 0; tries < 100; tries++)); do
    rm -rf "$folder" 2>/dev/null && break
    sleep 0.1
  done
  ;;
inside)
  # The outer /proc, still mounted here, shows the process id outside the namespace.
  read -r pid _ </proc/self/stat
  if [ -n "$root" ]; then show_machine; fi
  mount -t proc proc "$root/proc"
  # nsenter --root must find the other root: ready only after chroot. bash reaps every orphaned process, also while it waits
  # for input.
  stay="echo ready $pid; while read -r _; do :; done"
  if [ -n "$root" ]; then exec chroot "$root" bash -c "$stay"; fi
  exec bash -c "$stay"
  ;;
try)
  if ! said=$(unshare --pid --fork --mount --propagation private mount -t proc proc /proc 2>&1); then
    echo "creating namespaces is not permitted here: $said" >&2
    exit 3
  fi
  ;;
esac
