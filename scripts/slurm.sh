#!/usr/bin/env bash
# The root file system of Debian 13 with its Slurm (24.11), for tests on a second generation beside the one of Debian 12. Prints its
# folder; everything else is said on standard error.
#
# mmdebstrap makes it from the archive that this machine's own packages come from, once: it is kept under DOCTOR_BED_CACHE by the
# hash of this file. That takes a minute or two and 120 MB, and needs root, as do the tests that use it. Nothing is started.
#
# Where it cannot be done, the last line says why: "not run: …", exit 3, or exit 1 with CI=true.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=trixie
packages=(munge slurmctld slurmd slurm-client slurmrestd slurm-wlm-jwt-plugin)

say() { echo "$*" >&2; }

cannot() {
  say "not run: $*"
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
folder=$cache/slurm-$suite-$(sha256sum scripts/slurm.sh | cut -c 1-16)

# The archive that apt has Debian itself from: not that of its security updates, nor of anybody else.
# shellcheck disable=SC2016 # apt expands it.
archive() {
  apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(REPO_URI)' 2>/dev/null | sed -n 's/^Debian|Debian|//p' | sort -u | head -n 1
}

make_root() {
  local from
  [ "$(id -u)" -eq 0 ] || cannot "a root file system is made by root"
  command -v mmdebstrap >/dev/null || cannot "mmdebstrap is not installed; scripts/system.sh brings it"
  from=$(archive)
  [ -n "$from" ] || cannot "apt knows no archive of Debian on this machine (apt-get update makes it known)"
  new=$(mktemp -d "$folder.new.XXXXXX")
  # What mmdebstrap may have left mounted in there is this machine's own.
  trap 'rm -rf --one-file-system "$new"' EXIT
  chmod 755 "$new"
  say "making a Debian $suite with Slurm: a minute or two, once"
  # Manuals and translations are half of it.
  mmdebstrap --variant=essential --include="$(IFS=,; echo "${packages[*]}")" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --aptopt='Acquire::Retries "3"' \
    "$suite" "$new" "$from" >&2 ||
    cannot "Debian $suite cannot be made from the archive of this machine; mmdebstrap says why above"
  rm -rf "$folder"
  mv "$new" "$folder"
  trap - EXIT
  say "kept in $folder"
}

if [ ! -x "$folder/usr/sbin/slurmctld" ]; then
  mkdir -p "$cache"
  # Who comes second waits, and finds it done.
  exec 9>"$folder.lock"
  flock 9
  if [ ! -x "$folder/usr/sbin/slurmctld" ]; then make_root; fi
fi
echo "$folder"
