#!/usr/bin/env bash
# The reboot program of Slurm: kills the node's slurmd and starts it again as after a boot, or never.
#
# slurmd passes neither the node's name nor an environment; both are in the command line of the slurmd above this process. A
# file never.NODE beside this script marks a node that does not come back.
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

here=$(dirname "$0")
pid=$PPID
node=
while [ "$pid" -gt 1 ]; do
  mapfile -d '' -t words <"/proc/$pid/cmdline"
  for ((at = 0; at + 1 < ${#words[@]}; at++)); do
    if [ "${words[at]}" = -N ]; then node=${words[at + 1]}; fi
  done
  [ -z "$node" ] || break
  # The name in the second column may contain blanks: parse behind its closing bracket.
  stat=$(<"/proc/$pid/stat")
  read -r _ pid _ <<<"${stat##*) }"
done
[ -n "$node" ] || { echo "no slurmd above this process" >&2; exit 1; }

echo "$node" >>"$here/reboots"
# In its own session, because slurmd's ends with it.
setsid bash -c '
  kill -KILL "$1"
  while [ -e "/proc/$1/exe" ]; do sleep 0.05; done
  [ -e "$3/never.$2" ] || exec slurmd -b -N "$2" -f "$3/slurm.conf"
' bash "$pid" "$node" "$here" </dev/null >>"$here/reboot.log" 2>&1 &
