#!/usr/bin/env bash
# A PID and mount namespace for the processes of one Slurm, so that the kernel ends whatever they started.
#
#   keeper.sh keep FOLDER [ROOT]     says "ready PID" on standard output, and stays until its standard input ends
#   keeper.sh try                    whether this may be done here at all; the last line says why not
#
# Slurm's daemons leave their parent's session, and their jobs leave theirs: no list of processes is complete. The first process
# of the namespace waits for the end of its input, which comes however the process that holds the other end went; with it goes
# everything in there, jobs included. `keep` waits outside and removes FOLDER.
#
# With ROOT, a root file system of another distribution, the processes see that in place of this machine's, and everything that is
# not a distribution's own (devices, homes, temporary files, FOLDER) at the path where it is.
set -euo pipefail

what=$1 folder=${2:-} root=${3:-}

# What a distribution brings by itself. The rest of this machine is shown in the other's root.
own=' bin boot etc lib lib32 lib64 libx32 lost+found proc sbin usr var '

# Who is who must be the same on both sides: numbers of users are in messages and files.
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
  # Whoever ends the writer's process group must not end this one before it has removed the files.
  trap '' INT HUP TERM
  unshare --pid --fork --mount --propagation private --kill-child "$BASH" "$0" inside "$folder" "$root" || true
  # A process that was just killed may still create a file while its folder is removed.
  for ((tries = 0; tries < 100; tries++)); do
    rm -rf "$folder" 2>/dev/null && break
    sleep 0.1
  done
  ;;
inside)
  # Until /proc is this namespace's own, it shows by which number the outside knows this process.
  read -r pid _ </proc/self/stat
  if [ -n "$root" ]; then show_machine; fi
  mount -t proc proc "$root/proc"
  # Who enters this process' root must find the other one there: it is ready after chroot and not before.
  # bash collects every process whose parent has gone, also while it waits for input.
  stay="echo ready $pid; while read -r _; do :; done"
  if [ -n "$root" ]; then exec chroot "$root" bash -c "$stay"; fi
  exec bash -c "$stay"
  ;;
try)
  if ! said=$(unshare --pid --fork --mount --propagation private mount -t proc proc /proc 2>&1); then
    echo "namespaces of one's own are not allowed here: $said" >&2
    exit 3
  fi
  ;;
esac
