#!/usr/bin/env bash
# Creates a root file system of a Debian release with systemd and apt, in which tests install our packages. Prints its folder; all
# other output is on standard error.
#   debian-root.sh SUITE [PACKAGE...]      SUITE is bookworm or trixie; PACKAGE is installed, too
#
# mmdebstrap creates it once from the archive of this machine's own packages: it is kept under DOCTOR_BED_CACHE by the hash of
# this file and of the packages. That takes a minute and 250 MB, and needs root. Nothing is started.
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

[ $# -ge 1 ] || { sed -n '4s/^# *//p' "$0" >&2 && exit 2; }
suite=$1
shift
packages=(systemd "$@")
cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
folder=$cache/debian-$suite-$({ cat scripts/debian-root.sh && echo "${packages[*]}"; } | sha256sum | cut -c 1-16)

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
  say "building a Debian $suite with systemd: a minute, once"
  mmdebstrap --variant=apt --include="$(IFS=,; echo "${packages[*]}")" --aptopt='Acquire::Retries "3"' "$suite" "$new" "$from" >&2 ||
    cannot "Debian $suite cannot be built from the archive of this machine; see the output of mmdebstrap above"
  # The archive's address and its lists, which no test uses.
  rm -rf "$new"/etc/apt/sources.list "$new"/var/lib/apt/lists/*
  rm -rf "$folder"
  mv "$new" "$folder"
  trap - EXIT
  say "cached in $folder"
}

if [ ! -x "$folder/usr/bin/systemctl" ]; then
  mkdir -p "$cache"
  # A concurrent run waits here and finds it done.
  exec 9>"$folder.lock"
  flock 9
  if [ ! -x "$folder/usr/bin/systemctl" ]; then make_root; fi
fi
echo "$folder"
