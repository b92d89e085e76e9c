#!/usr/bin/env bash
# A node on this machine: containerd and a kubelet in namespaces, so that the kernel removes what they leave.
#
#   node.sh keep FOLDER PROGRAMS NAME        reads commands from standard input and replies on standard output
#   node.sh try - - -                        checks that this machine allows it; the last line is the reason if not
#
# The first process of a PID namespace reads the commands. It exits when its input ends, which happens even if the writer is
# killed, and the kernel then ends everything else: containerd, its shims, all containers, the kubelet. Mounts end with their
# namespace, the link to the host with its own. `keep` waits outside and removes what no namespace contains: cgroup
# directories and files.
#
# FOLDER holds the configuration, and the node's /run, /var/lib and /var/log. PROGRAMS is the folder of the kubelet.
set -euo pipefail

what=$1 folder=$2 programs=$3 name=$4 keeper=${5:-$$}
# Named after the process that removes it, so that a later run recognises what was left behind.
cgroup=doctor-bed-$keeper

# Kernel-wide settings that the kubelet writes. Files of the node are mounted over them, so nothing has to be restored.
sysctls=(vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes)

# Prints the roots of all cgroup hierarchies: one with v2, one per controller with v1.
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
      # Enables the controllers that exist. If one cannot be enabled, the kubelet reports it.
      for file in $(<"$root/cgroup.controllers"); do echo "+$file" >"$root/cgroup.subtree_control" || true; done
    fi
    mkdir "$root/$cgroup"
    # In v1, a new group has neither CPUs nor memory nodes.
    for file in cpuset.mems cpuset.cpus; do
      if [ -e "$root/$cgroup/$file" ] && [ -e "$root/$file" ] && [ ! -e "$root/cgroup.controllers" ]; then
        cat "$root/$file" >"$root/$cgroup/$file"
      fi
    done
  done
}

# A group can be removed once its last process has exited, which may be a moment after it was killed.
remove_cgroups() { # name
  local root
  for root in $(hierarchies); do
    for _ in $(seq 100); do
      [ -d "$root/$1" ] || break
      find "$root/$1" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
    done
  done
}

# Removes what is left of nodes whose keeper was killed.
remove_forgotten() {
  local root left
  for root in $(hierarchies); do
    for left in "$root"/doctor-bed-*; do
      if [ -d "$left" ] && [ ! -d "/proc/${left##*-}" ]; then remove_cgroups "${left##*/}"; fi
    done
  done
}

keep() {
  # A signal from the terminal must not end this process: it ends with its input.
  trap '' INT TERM HUP
  trap 'remove_cgroups "$cgroup"; rm -rf --one-file-system "$folder"' EXIT
  # The caller reads errors from standard output.
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

# Links the node to the host. The name of the link reserves its number and thereby the addresses.
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
  # The kubelet needs a default route.
  ip route add default via "198.18.$number.1"
  echo "address 198.18.$number.1"
  exec unshare --pid --fork --kill-child bash "$folder/node.sh" live "$folder" "$programs" "$name" "$keeper"
}

furnish() {
  local file
  # As systemd configures a node: later mounts propagate to containers that request it, and not to this machine.
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
    # Mounts that the kubelet makes for a container must propagate to it.
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
      # Suppresses the shell's own report.
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
