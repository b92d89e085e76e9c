#!/usr/bin/env bash
# A world for one dstack server and its hosts: processes, network and temporary files of their own.
#
#   world.sh keep FOLDER HOSTS     says "ready" on standard output, does what lines of standard input say, and stays until that ends
#   world.sh host FOLDER N         what `keep` starts for each host
#   world.sh try                   whether this may be done here at all; the last line says why not
#
# The server runs in the world itself and each host in a network, mount and UTS namespace below it, joined by a link: the server is
# at 10.98.N.1 and host N at 10.98.N.2. The socket on which the server listens was made outside, where the test is, and handed down.
# The first process of the world waits for the end of its input, which comes however the process that holds the other end went; with
# it goes everything in there. `keep` waits outside and removes FOLDER.
set -euo pipefail

what=$1 folder=${2:-} hosts=${3:-}

case $what in
keep)
  # Whoever ends the writer's process group must not end this one before it has removed the files.
  trap '' INT HUP TERM
  unshare --pid --fork --mount --net --propagation private --kill-child "$BASH" "$0" inside "$folder" "$hosts" || true
  # A process that was just killed may still create a file while its folder is removed.
  for ((tries = 0; tries < 100; tries++)); do
    rm -rf "$folder" 2>/dev/null && break
    sleep 0.1
  done
  ;;
inside)
  mount -t proc proc /proc
  mount -t tmpfs -o mode=755 tmpfs /run
  ip link set lo up
  for ((n = 1; n <= hosts; n++)); do
    ip netns add "host$n"
    ip link add "host$n" type veth peer name eth0 netns "host$n"
    ip address add "10.98.$n.1/30" dev "host$n"
    ip link set "host$n" up
    ip -netns "host$n" address add "10.98.$n.2/30" dev eth0
    ip -netns "host$n" link set eth0 up
    ip -netns "host$n" link set lo up
    nsenter --net="/run/netns/host$n" unshare --mount --uts --propagation private "$BASH" "$0" host "$folder" "$n" \
      </dev/null >"$folder/host$n.log" 2>&1 &
  done
  "$DOCTOR_BED_PYTHON" "$folder/server.py" "$DOCTOR_BED_SOCKET" </dev/null >"$folder/server.log" 2>&1 &
  echo ready
  # bash collects every process whose parent has gone, also while it waits for input.
  while read -r word n; do
    case $word in
    cut) ip link set "host$n" down ;;
    join) ip link set "host$n" up ;;
    # The runner alone: it can no longer say how its job ended, and with its terminal the job goes.
    lose) kill -KILL "$(cat "$folder/host$n/home/.dstack/runner.pid")" ;;
    esac
    echo "$word $n"
  done
  ;;
host)
  n=$hosts
  hostname "host$n"
  own=$folder/host$n
  mount --bind "$own/home" /root
  mount --bind "$own/bin" /usr/local/bin
  mount -t tmpfs -o mode=755 tmpfs /etc/systemd/system
  mount -t tmpfs -o mode=755 tmpfs /run
  mkdir /run/sshd /run/bed
  mount --bind "$own" /run/bed
  # Last, because everything above lies in there. What is uploaded to a host is not another's.
  mount --bind "$own/tmp" /tmp
  exec /usr/sbin/sshd -D -f /run/bed/sshd_config -E /run/bed/sshd.log
  ;;
try)
  if ! said=$(unshare --pid --fork --mount --net --propagation private "$BASH" -c \
    'mount -t tmpfs tmpfs /run && ip netns add try && ip link add try type veth peer name eth0 netns try' 2>&1); then
    echo "namespaces and links of one's own are not allowed here: $said" >&2
    exit 3
  fi
  ;;
esac
