#!/usr/bin/env bash
# Writes an image for a real node in tests to standard output, as an archive.
#   bed-images.sh pause                        the sandbox image that holds a pod's namespaces
#   bed-images.sh controller|node PROGRAM      our image as deploy/image builds it, with the program under test
#
# The packages of our images are cached under DOCTOR_BED_CACHE by the hash of their sources; the program is a layer on top,
# without debug information.
#
# If this cannot run, the last line is the reason: "not run: …", exit 3, or exit 1 with CI=true.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "$*" >&2; }

cannot() {
  say "not run: $*"
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

kind=${1:-} program=${2:-}
case $kind:$# in
pause:1) ;;
controller:2) name=cluster-doctor ;;
node:2) name=cluster-doctor-node ;;
*)
  sed -n '3,4s/^# *//p' "$0" >&2
  exit 2
  ;;
esac
for tool in cc objcopy apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || cannot "building images needs $tool, which is not installed"
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ "$kind" = pause ]; then
  mkdir "$work/layer"
  # It needs no signal handlers: ending a pod kills it.
  cc -static -Os -s -x c -o "$work/layer/pause" - <<'C' || cannot "a static program cannot be built: libc6-dev is missing"
#include <unistd.h>
int main(void) {
  for (;;) pause();
}
C
  deploy/image/archive.sh cluster-doctor-testbed-pause:latest '{"Entrypoint":["/pause"]}' - "$work/layer"
  exit 0
fi

cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
base=$cache/image-$kind-$(cat deploy/image/rootfs.sh /etc/os-release | sha256sum | cut -c 1-16).tar

rootfs() {
  rm -rf "$work/root"
  deploy/image/rootfs.sh "$kind" "$work/root"
}

update_packages() {
  # Two concurrent apt-get runs break each other despite dpkg's own lock; this is the lock of scripts/system.sh.
  [ "$(id -u)" -eq 0 ] && flock /var/lock/cluster-doctor-apt.lock apt-get -o DPkg::Lock::Timeout=300 -qq update >&2
}

make_base() {
  say "fetching the packages of the $kind image, once"
  # In a fresh container the package list may be missing or old: retry with a new one.
  rootfs || { update_packages && rootfs; } ||
    cannot "the root file system of the $kind image cannot be built; see the output of deploy/image/rootfs.sh above"
  tar --create --file "$base.new" --directory "$work/root" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 .
  mv "$base.new" "$base"
}

if [ ! -e "$base" ]; then
  mkdir -p "$cache"
  # A concurrent run waits here and finds it done.
  exec 9>"$base.lock"
  flock 9
  [ -e "$base" ] || make_base
fi
mkdir -p "$work/layer/usr/local/bin"
objcopy --strip-all "$program" "$work/layer/usr/local/bin/${program##*/}"
deploy/image/archive.sh "$name:latest" "$(deploy/image/config.sh "$kind")" - "$base" "$work/layer"
