#!/usr/bin/env bash
# The namespaces of one dstack server and its hosts, with their own processes, network and temporary files.
#
#   world.sh keep FOLDER HOSTS     prints "ready" on standard output, executes lines of its standard input, and runs until that ends
#   world.sh host FOLDER N         one host, started by `keep`
#   world.sh try                   checks that this machine allows it; the last line is the reason if not
#
# The server runs in the outer namespaces, and each host in a network, mount and UTS namespace below, connected by a veth
# pair: the server is at 10.98.N.1, host N at 10.98.N.2. The server inherits its listening socket from the test outside. The
# first process of the PID namespace waits for the end of its input, which comes even if the process at the other end is
# killed; all others end with it. `keep` waits outside and removes FOLDER.
set -euo pipefail

what=$1 folder=${2:-} hosts=${3:-}

case $what in
keep)
  # A signal to the writer's process group must not end this process before it has removed the files.
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
  # bash reaps every orphaned process, also while it waits for input.
  while read -r word n; do
    case $word in
    cut) ip link set "host$n" down ;;
    join) ip link set "host$n" up ;;
    # Only the runner: it can no longer report how its job ended, and closing its terminal ends the job.
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
  # Mounted last, because all paths above are below /tmp. Uploads to a host stay on that host.
  mount --bind "$own/tmp" /tmp
  exec /usr/sbin/sshd -D -f /run/bed/sshd_config -E /run/bed/sshd.log
  ;;
try)
  if ! said=$(unshare --pid --fork --mount --net --propagation private "$BASH" -c \
    'mount -t tmpfs tmpfs /run && ip netns add try && ip link add try type veth peer name eth0 netns try' 2>&1); then
    echo "creating namespaces and links is not permitted here: $said" >&2
    exit 3
  fi
  ;;
esac
