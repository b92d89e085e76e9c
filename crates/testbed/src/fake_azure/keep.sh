#!/usr/bin/env bash
# A fake Azure: a private network in which a server plays the resource manager and machines are sshd with their own files.
#
#   keep.sh keep FOLDER PYTHON    prints "ready" on standard output, and runs until its standard input ends
#   keep.sh inside FOLDER PYTHON  the same, inside the namespaces
#   keep.sh vm FOLDER NAME ADDRESS ADMIN    runs the sshd of one machine until it is ended
#   keep.sh try                   checks that this machine allows namespaces; the last line is the reason if not
#
# All processes are in one PID namespace whose first process waits for the end of its input, which comes even if the process
# at the other end is killed.
set -euo pipefail

what=$1 folder=${2:-}

case $what in
keep)
  trap '' INT HUP TERM
  unshare --pid --fork --mount --net --propagation private --kill-child "$BASH" "$0" inside "$folder" "$3" || true
  ;;
inside)
  mount -t proc proc /proc
  ip link set lo up
  # The address of Azure's metadata service.
  ip address add 169.254.169.254/32 dev lo
  # Machines are added as they are created; all of them see the same file.
  cp /etc/hosts "$folder/hosts"
  mount --bind "$folder/hosts" /etc/hosts
  "$3" "$folder/arm.py" "$folder" "$0" >"$folder/arm.log" 2>&1 </dev/null &
  for _ in $(seq 600); do
    [ -e "$folder/arm.ready" ] && break
    kill -0 $! || { tail -n 3 "$folder/arm.log" >&2; exit 1; }
    sleep 0.1
  done
  [ -e "$folder/arm.ready" ]
  echo ready
  # bash reaps every orphaned process, also while it waits for input.
  while read -r _; do :; done
  ;;
vm)
  name=$3 address=$4 admin=$5
  place=$folder/vm-$name
  hostname "$name"
  cp /etc/passwd /etc/group /etc/shadow "$place/"
  echo "$admin:x:10007:10007::/home/$admin:/bin/bash" >>"$place/passwd"
  echo "$admin:x:10007:" >>"$place/group"
  echo "$admin:*:19000:0:99999:7:::" >>"$place/shadow"
  for file in passwd group shadow; do mount --bind "$place/$file" "/etc/$file"; done
  mount -t tmpfs tmpfs /home
  mount -t tmpfs tmpfs /run
  mount -t tmpfs tmpfs /etc/ssh
  mkdir -p /run/sshd "/home/$admin/.ssh"
  cp "$place/authorized_keys" "/home/$admin/.ssh/"
  chown -R 10007:10007 "/home/$admin"
  chmod 700 "/home/$admin/.ssh"
  ssh-keygen -q -t ed25519 -N '' -C "$name" -f /etc/ssh/ssh_host_ed25519_key
  printf '%s\n' 'UsePAM no' 'PasswordAuthentication no' 'KbdInteractiveAuthentication no' 'PermitRootLogin no' \
    'HostKey /etc/ssh/ssh_host_ed25519_key' 'PidFile none' 'MaxStartups 100' >/etc/ssh/sshd_config
  ip address add "$address/16" dev lo 2>/dev/null || true
  echo "$address $name" >>/etc/hosts
  touch "$place/up"
  exec /usr/sbin/sshd -D -f /etc/ssh/sshd_config -o "ListenAddress=$address" -E "$place/sshd.log"
  ;;
try)
  if ! said=$(unshare --pid --fork --mount --net --propagation private mount -t proc proc /proc 2>&1); then
    echo "creating namespaces is not permitted here: $said" >&2
    exit 3
  fi
  ;;
esac
