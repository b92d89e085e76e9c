#!/usr/bin/env bash
# The dstack server that tests stand on: prints the folder in which its `python` lies; everything else is said on standard error.
# It is the one of PyPI in a virtual environment of its own, fetched once and kept under DOCTOR_BED_CACHE. Nothing is started.
#
# Where it cannot be done, the last line says why: "not run: …", exit 3, or exit 1 with CI=true.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=("dstack[server]==0.22.5")

cannot() {
  echo "not run: $*" >&2
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
folder=$cache/dstack-$(printf '%s\n' "${packages[@]}" | sha256sum | cut -c 1-16)

if [ ! -x "$folder/bin/dstack" ]; then
  mkdir -p "$cache"
  # Who comes second waits, and finds it done.
  exec 9>"$folder.lock"
  flock 9
  if [ ! -x "$folder/bin/dstack" ]; then
    python3 -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 10)' 2>/dev/null ||
      cannot "Python 3.10 or later with venv is not installed (apt-get install python3-venv)"
    echo "fetching the dstack server: a minute or two, once" >&2
    # A virtual environment knows its own place: it is made where it stays, and its last program tells that it is whole.
    rm -rf "$folder"
    python3 -m venv "$folder" >&2
    "$folder/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" >&2 ||
      { rm -rf "$folder"; cannot "dstack cannot be fetched; pip says why above"; }
  fi
fi
echo "$folder/bin"
