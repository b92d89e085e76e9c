#!/usr/bin/env bash
# Installs Azure's own command line for tests of `doctor fleet provision`: prints the folder of `az` and its `python`; all other
# output is on standard error. It is fetched once and kept under DOCTOR_BED_CACHE. It never talks to Azure: a server of ours on
# loopback (crates/testbed/src/azure) answers.
#
# If this cannot run, the last line is the reason: "not run: …", exit 3, or exit 1 with CI=true.
set -euo pipefail
cd "$(dirname "$0")/.."

# Of the 150 packages that azure-cli depends on, only those that it loads for the tests; the rest are clients of services that the
# tests do not use, and four fifths of the time and space.
packages=(
  argcomplete==3.5.3 azure-cli==2.91.0 azure-cli-core==2.91.0 azure-cli-telemetry==1.1.0 azure-common==1.1.28 azure-core==1.39.0
  azure-mgmt-core==1.6.0 azure-mgmt-imagebuilder==1.3.0 azure-mgmt-monitor==7.0.0 azure-mgmt-resource==24.0.0
  azure-mgmt-resource-deployments==1.0.0b1 azure-mgmt-resource-deploymentstacks==1.0.0 bcrypt==5.0.0 certifi==2026.10.18 cffi==2.1.1
  chardet==5.2.0 charset-normalizer==3.5.2 cryptography==50.0.2 distro==1.9.0 humanfriendly==10.0 idna==3.20 isodate==0.7.2 jmespath==1.1.0
  knack==0.14.0 msal==1.39.0 msal-extensions==1.3.1 msrest==0.7.1 oauthlib==4.0.1 packaging==26.3 portalocker==2.10.1 psutil==7.2.2
  pycparser==3.12 pygments==2.21.0 pyjwt==2.15.1 pysocks==1.7.1 pyyaml==6.0.3 requests==2.34.2 requests-oauthlib==2.0.0
  semver==3.1.1 tabulate==0.10.0 typing_extensions==4.16.0 urllib3==2.8.0
)

cannot() {
  echo "not run: $*" >&2
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
folder=$cache/azure-$(sha256sum scripts/azure.sh | cut -c 1-16)

if [ ! -e "$folder/whole" ]; then
  mkdir -p "$cache"
  # A concurrent run waits here and finds it done.
  exec 9>"$folder.lock"
  flock 9
  if [ ! -e "$folder/whole" ]; then
    python3 -c 'import venv, ensurepip' 2>/dev/null ||
      cannot "Python 3 with venv is not installed (apt-get install python3-venv)"
    echo "fetching the Azure CLI: a minute or two, once" >&2
    # A virtual environment contains its own path: it is created in place, and a file marks it as complete.
    rm -rf "$folder"
    python3 -m venv "$folder" >&2
    # Modules are compiled on first use.
    "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-compile "${packages[@]}" >&2 ||
      { rm -rf "$folder"; cannot "azure-cli cannot be fetched; see the output of pip above"; }
    touch "$folder/whole"
  fi
fi
echo "$folder/bin"
