#!/usr/bin/env bash
# Installs the dstack server for tests: prints the folder of its `python`; all other output is on standard error. It comes from
# PyPI into a virtual environment, is fetched once and kept under DOCTOR_BED_CACHE. Nothing is started.
#
# If this cannot run, the last line is the reason: "not run: …", exit 3, or exit 1 with CI=true.
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
  # A concurrent run waits here and finds it done.
  exec 9>"$folder.lock"
  flock 9
  if [ ! -x "$folder/bin/dstack" ]; then
    python3 -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 10)' 2>/dev/null ||
      cannot "Python 3.10 or later with venv is not installed (apt-get install python3-venv)"
    echo "fetching the dstack server: a minute or two, once" >&2
    # A virtual environment contains its own path: it is created in place, and its last program marks it as complete.
    rm -rf "$folder"
    python3 -m venv "$folder" >&2
    "$folder/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" >&2 ||
      { rm -rf "$folder"; cannot "dstack cannot be fetched; see the output of pip above"; }
  fi
fi
echo "$folder/bin"
