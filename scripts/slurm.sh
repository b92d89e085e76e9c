#!/usr/bin/env bash
# Creates a root file system of Debian 13 with its Slurm (24.11), for tests on a second release beside that of Debian 12. Prints
# its folder; all other output is on standard error.
#
# mmdebstrap creates it once from the archive of this machine's own packages: it is kept under DOCTOR_BED_CACHE by the hash of
# this file. That takes a minute or two and 120 MB, and needs root, as do the tests that use it. Nothing is started.
#
# If this cannot run, the last line is the reason: "not run: …", exit 3, or exit 1 with CI=true.
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

# Prints the archive that apt uses for Debian itself, not for security updates or third-party packages.
# shellcheck disable=SC2016 # apt expands it.
archive() {
  apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(REPO_URI)' 2>/dev/null | sed -n 's/^Debian|Debian|//p' | sort -u | head -n 1
}

make_root() {
  local from
  [ "$(id -u)" -eq 0 ] || cannot "building a root file system needs root"
  command -v mmdebstrap >/dev/null || cannot "mmdebstrap is not installed; scripts/system.sh installs it"
  from=$(archive)
  [ -n "$from" ] || cannot "apt has no Debian archive on this machine (run apt-get update)"
  new=$(mktemp -d "$folder.new.XXXXXX")
  # Anything that mmdebstrap may have left mounted in there belongs to this machine.
  trap 'rm -rf --one-file-system "$new"' EXIT
  chmod 755 "$new"
  say "building a Debian $suite with Slurm: a minute or two, once"
  # Manuals and translations are half of the size.
  mmdebstrap --variant=essential --include="$(IFS=,; echo "${packages[*]}")" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --aptopt='Acquire::Retries "3"' \
    "$suite" "$new" "$from" >&2 ||
    cannot "Debian $suite cannot be built from the archive of this machine; see the output of mmdebstrap above"
  rm -rf "$folder"
  mv "$new" "$folder"
  trap - EXIT
  say "cached in $folder"
}

if [ ! -x "$folder/usr/sbin/slurmctld" ]; then
  mkdir -p "$cache"
  # A concurrent run waits here and finds it done.
  exec 9>"$folder.lock"
  flock 9
  if [ ! -x "$folder/usr/sbin/slurmctld" ]; then make_root; fi
fi
echo "$folder"
