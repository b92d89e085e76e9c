#!/usr/bin/env bash
# A node of its own on this machine: containerd and a kubelet in namespaces, so that the kernel removes what they leave.
#
#   node.sh keep FOLDER PROGRAMS NAME        orders are read from standard input, answers go to standard output
#   node.sh try - - -                        whether this may be done here at all; the last line says why not
#
# The first process of a PID namespace takes the orders. When its input ends, which it does however the process that writes it
# ended, it goes, and the kernel ends everything else in there: containerd, its shims, every container, the kubelet. Mounts go
# with their namespace, the link to the host with its own. What no namespace holds is left to `keep`, which waits outside:
# the directories of control groups and the files.
#
# FOLDER has the settings of both, and gets /run, /var/lib and /var/log of the node. PROGRAMS is where the kubelet is.
set -euo pipefail

what=$1 folder=$2 programs=$3 name=$4 keeper=${5:-$$}
# Named by the process that removes it, so that those who come later know what was left behind.
cgroup=doctor-bed-$keeper

# What the kubelet writes for the whole kernel. It writes to files of the node instead: nothing has to be put back.
sysctls=(vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes)

# The roots of all hierarchies: one with cgroup v2, one for each controller with v1.
hierarchies() {
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    echo /sys/fs/cgroup
    return
  fi
  local root
  for root in /sys/fs/cgroup/*/; do
    if [ -e "${root}cgroup.procs" ] && [ ! -L "${root%/}" ]; then echo "${root%/}"; fi
  done
}

make_cgroups() {
  local root file
  for root in $(hierarchies); do
    if [ -e "$root/cgroup.subtree_control" ] && [ -s "$root/cgroup.controllers" ]; then
      # Those that are there; one that cannot be had is missed by the kubelet, which says so.
      for file in $(<"$root/cgroup.controllers"); do echo "+$file" >"$root/cgroup.subtree_control" || true; done
    fi
    mkdir "$root/$cgroup"
    # In v1 a group begins without any processor or memory.
    for file in cpuset.mems cpuset.cpus; do
      if [ -e "$root/$cgroup/$file" ] && [ -e "$root/$file" ] && [ ! -e "$root/cgroup.controllers" ]; then
        cat "$root/$file" >"$root/$cgroup/$file"
      fi
    done
  done
}

# A group can go once its last process is gone, which may be a moment after it was killed.
remove_cgroups() { # name
  local root
  for root in $(hierarchies); do
    for _ in $(seq 100); do
      [ -d "$root/$1" ] || break
      find "$root/$1" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
    done
  done
}

# What is left of a node whose keeper was killed.
remove_forgotten() {
  local root left
  for root in $(hierarchies); do
    for left in "$root"/doctor-bed-*; do
      if [ -d "$left" ] && [ ! -d "/proc/${left##*-}" ]; then remove_cgroups "${left##*/}"; fi
    done
  done
}

keep() {
  # Whoever ends the tests from a terminal must not end this: it ends when its input does.
  trap '' INT TERM HUP
  trap 'remove_cgroups "$cgroup"; rm -rf --one-file-system "$folder"' EXIT
  # What fails is said where it is read.
  exec 2>&1
  remove_forgotten
  make_cgroups
  unshare --mount --net --uts --ipc --propagation private bash "$folder/node.sh" connect "$folder" "$programs" "$name" "$keeper" || true
}

try() {
  exec 2>&1
  trap 'remove_cgroups "$cgroup"' EXIT
  make_cgroups
  unshare --mount --net --uts --ipc --pid --fork --propagation private ip link add eth0 type veth peer name eth1
}

# Links the node to the host. The link's name is taken by the first who comes, and with it the addresses.
connect() {
  local number why
  for number in $(seq 0 255); do
    why=$(ip link add eth0 type veth peer name "doctor-bed-$number" netns "$keeper" 2>&1) && break
    case $why in *"File exists"*) ;; *) echo "$why" && exit 1 ;; esac
  done
  on_host() { nsenter --target "$keeper" --net "$@"; }
  on_host ip address add "198.18.$number.1/30" dev "doctor-bed-$number"
  on_host ip link set "doctor-bed-$number" up
  ip address add "198.18.$number.2/30" dev eth0
  ip link set lo up
  ip link set eth0 up
  # The kubelet asks for one.
  ip route add default via "198.18.$number.1"
  echo "address 198.18.$number.1"
  exec unshare --pid --fork --kill-child bash "$folder/node.sh" live "$folder" "$programs" "$name" "$keeper"
}

furnish() {
  local file
  # As systemd has it on a node: what is mounted here later is seen by containers that ask for it, and by nobody outside.
  mount --make-shared /
  mount -t proc proc /proc
  for file in "${sysctls[@]}"; do
    [ -e "/proc/sys/$file" ] || continue
    cat "/proc/sys/$file" >"$folder/sysctl-${file//\//-}"
    mount --bind "$folder/sysctl-${file//\//-}" "/proc/sys/$file"
  done
  for file in run var/lib var/log; do
    mkdir -p "$folder/$file"
    mount --bind "$folder/$file" "/$file"
    # What the kubelet mounts for a container has to reach it.
    mount --make-shared "/$file"
  done
  mkdir -p /run/lock
  hostname "$name"
}

start_kubelet() {
  "$programs/kubelet" --config="$folder/kubelet.json" --kubeconfig="$folder/kubeconfig" --hostname-override="$name" \
    --cgroup-root="/$cgroup" --node-ip="$(ip -4 -o address show dev eth0 | sed 's|.* inet \([0-9.]*\)/.*|\1|')" \
    </dev/null >>"$folder/kubelet.log" 2>&1 &
  kubelet=$!
}

live() {
  local order kubelet=
  furnish
  containerd --config "$folder/containerd.toml" </dev/null >>"$folder/containerd.log" 2>&1 &
  while read -r order; do
    case $order in
    "start kubelet")
      start_kubelet
      echo "started"
      ;;
    "kill kubelet")
      # The shell would report it as well.
      { kill -KILL "$kubelet" && wait "$kubelet"; } 2>/dev/null || true
      echo "killed"
      ;;
    esac
  done
}

case $what in
try) try ;;
keep) keep ;;
connect) connect ;;
live) live ;;
esac
