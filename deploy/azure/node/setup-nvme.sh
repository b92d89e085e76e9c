#!/bin/sh
# Combines the local NVMe disks of this machine to a RAID-0 at /mnt/resource_nvme, with the caches of Docker and Hugging Face on
# it. Runs at every boot: an existing array is mounted again, and only empty disks are made into a new one. Without such disks,
# nothing is changed.
#
# Only Azure's local disks are used, selected by their model: on newer machine types the system disk is an NVMe disk too.
set -eu
root=${ROOT:-}
mount=$root/mnt/resource_nvme
array=/dev/md/resource_nvme

say() { echo "setup-nvme: $*"; }

local_disks() {
  for model in "$root"/sys/block/nvme*n*/device/model; do
    [ -e "$model" ] || continue
    grep -q 'Microsoft NVMe Direct Disk' "$model" || continue
    name=${model%/device/model}
    echo "/dev/${name##*/}"
  done
}

# Other settings are preserved: Docker's configuration names the GPU runtime.
use_for_caches() {
  mkdir -p "$mount/docker" "$mount/hf_cache" "$root/etc/docker" "$root/etc/profile.d"
  chmod 711 "$mount/docker"
  chmod 1777 "$mount" "$mount/hf_cache"
  python3 - "$root/etc/docker/daemon.json" "/mnt/resource_nvme/docker" <<'END'
import json, os, sys
path, place = sys.argv[1:]
settings = {}
if os.path.exists(path) and os.path.getsize(path):
    with open(path) as file:
        settings = json.load(file)
if settings.get("data-root") != place:
    settings["data-root"] = place
    with open(path + ".new", "w") as file:
        json.dump(settings, file, indent=2)
        file.write("\n")
    os.replace(path + ".new", path)
END
  echo 'export HF_HOME=/mnt/resource_nvme/hf_cache' >"$root/etc/profile.d/hf_home.sh"
}

if mountpoint -q "$mount"; then
  say "$mount is already mounted"
  use_for_caches
  exit 0
fi
disks=$(local_disks)
if [ -z "$disks" ]; then
  say "no local NVMe disks: nothing to do"
  exit 0
fi
# The list contains plain device names.
# shellcheck disable=SC2086
set -- $disks
if mdadm --assemble --quiet "$array" "$@" 2>/dev/null; then
  say "the array of $# disks is assembled again"
  # An earlier attempt may have ended before it created a file system. 2: there is none; other results are left alone.
  blank=0
  blkid -p "$array" >/dev/null 2>&1 || blank=$?
  if [ "$blank" -eq 2 ]; then mkfs.xfs -q -L resource_nvme "$array"; fi
else
  for disk in "$@"; do
    found=$(wipefs --noheadings --output TYPE "$disk")
    if [ -n "$found" ]; then
      say "$disk has other content ($found): not changed" >&2
      exit 1
    fi
  done
  say "creating an array of $# disks"
  # --force: allows an array of one disk.
  mdadm --create "$array" --run --force --level 0 --name resource_nvme --homehost any --raid-devices $# "$@"
  mkfs.xfs -q -L resource_nvme "$array"
fi
mkdir -p "$mount"
mount "$array" "$mount"
use_for_caches
