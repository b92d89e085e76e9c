#!/usr/bin/env bash
# Installs the fake AWS for tests: prints the folder of `aws` and `moto_server`; all other output is on standard error. moto
# serves EC2, and `aws` is the real program. Both are fetched once and kept under DOCTOR_BED_CACHE.
#
# If this cannot run, the last line is the reason: "not run: …", exit 3, or exit 1 with CI=true.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=("moto[ec2]==5.1.22" flask==3.1.3 flask-cors==6.0.5 awscli==1.46.2)

cannot() {
  echo "not run: $*" >&2
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
folder=$cache/cloud-$(printf '%s\n' "${packages[@]}" | sha256sum | cut -c 1-16)

if [ ! -x "$folder/bin/moto_server" ]; then
  mkdir -p "$cache"
  # A concurrent run waits here and finds it done.
  exec 9>"$folder.lock"
  flock 9
  if [ ! -x "$folder/bin/moto_server" ]; then
    python3 -c 'import venv, ensurepip' 2>/dev/null ||
      cannot "Python 3 with venv is not installed (apt-get install python3-venv)"
    echo "fetching moto and the AWS CLI: a minute, once" >&2
    # A virtual environment contains its own path: it is created in place, and its last program marks it as complete.
    rm -rf "$folder"
    python3 -m venv "$folder" >&2
    "$folder/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" >&2 ||
      { rm -rf "$folder"; cannot "moto and awscli cannot be fetched; see the output of pip above"; }
  fi
fi
echo "$folder/bin"
