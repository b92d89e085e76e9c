#!/usr/bin/env bash
# An image for a real node in tests, as an archive on standard output.
#   bed-images.sh pause                        what holds a pod together
#   bed-images.sh controller|node PROGRAM      ours, as deploy/image makes it, with the program that is to be tested
#
# The packages of ours are kept under DOCTOR_BED_CACHE by the hash of what they are made from; the program is a layer on top of
# them, without what only a debugger reads.
#
# Where it cannot be done, the last line says why: "not run: …", exit 3, or exit 1 with CI=true.
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
  command -v "$tool" >/dev/null || cannot "making images needs $tool, which is not installed"
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ "$kind" = pause ]; then
  mkdir "$work/layer"
  # It needs no handlers: whoever ends a pod kills it.
  cc -static -Os -s -x c -o "$work/layer/pause" - <<'C' || cannot "a static program cannot be built: libc6-dev is missing"
#include <unistd.h>
int main(void) {
  for (;;) pause();
}
C
  deploy/image/archive.sh cluster-doctor-bed-pause:latest '{"Entrypoint":["/pause"]}' - "$work/layer"
  exit 0
fi

cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
base=$cache/image-$kind-$(cat deploy/image/rootfs.sh /etc/os-release | sha256sum | cut -c 1-16).tar

rootfs() {
  rm -rf "$work/root"
  deploy/image/rootfs.sh "$kind" "$work/root"
}

update_packages() {
  # Two apt-get at once break each other beyond what dpkg's own lock prevents: the lock of scripts/system.sh.
  [ "$(id -u)" -eq 0 ] && flock /var/lock/cluster-doctor-apt.lock apt-get -o DPkg::Lock::Timeout=300 -qq update >&2
}

make_base() {
  say "fetching the packages of the $kind's image, once"
  # As in a fresh container, the list of packages may be missing or old: once more with a new one.
  rootfs || { update_packages && rootfs; } ||
    cannot "the root file system of the $kind's image cannot be made; deploy/image/rootfs.sh says why above"
  tar --create --file "$base.new" --directory "$work/root" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 .
  mv "$base.new" "$base"
}

if [ ! -e "$base" ]; then
  mkdir -p "$cache"
  # Who comes second waits, and finds it done.
  exec 9>"$base.lock"
  flock 9
  [ -e "$base" ] || make_base
fi
mkdir -p "$work/layer/usr/local/bin"
objcopy --strip-all "$program" "$work/layer/usr/local/bin/${program##*/}"
deploy/image/archive.sh "$name:latest" "$(deploy/image/config.sh "$kind")" - "$base" "$work/layer"
