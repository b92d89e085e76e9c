#!/usr/bin/env bash
# Builds Helm for the chart's tests: prints the program's path; all other output is on standard error.
#
# HELM, if set, is that program. Otherwise Go builds it once from crates/testbed/kubernetes, which pins it: the result is kept under
# DOCTOR_BED_CACHE by the hash of go.sum and of this file. That takes two minutes, or half a minute after the control plane.
#
# If this cannot run, the last line is the reason: "not run: …", exit 3, or exit 1 with CI=true.
set -euo pipefail
cd "$(dirname "$0")/.."

module=crates/testbed/kubernetes

say() { echo "$*" >&2; }

cannot() {
  say "not run: $*"
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

if [ -n "${HELM:-}" ]; then
  [ -x "$HELM" ] || cannot "HELM names $HELM, which is not executable; unset the variable to build one"
  echo "$HELM"
  exit 0
fi

cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
version=$(sed -n 's|^\s*helm.sh/helm/v3 \(v[0-9.]*\).*|\1|p' "$module/go.mod")
folder=$cache/helm-$version-$(cat "$module/go.sum" scripts/helm.sh | sha256sum | cut -c 1-16)
# Without this, Helm assumes a cluster version of 2020 and rejects charts that need a newer one.
minor=$(sed -n 's|^\s*k8s.io/client-go => k8s.io/client-go v0\.\([0-9]*\)\..*|\1|p' "$module/go.mod")
flags="-s -w -X helm.sh/helm/v3/internal/version.version=$version"
for package in chartutil lint/rules; do
  flags+=" -X helm.sh/helm/v3/pkg/$package.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/$package.k8sVersionMinor=$minor"
done

if [ ! -x "$folder/helm" ]; then
  mkdir -p "$cache"
  # A concurrent run waits here and finds it done.
  exec 9>"$folder.lock"
  flock 9
  if [ ! -x "$folder/helm" ]; then
    command -v go >/dev/null || cannot "helm is built with Go, which is not installed (1.26 or newer; any from 1.21 fetches that)"
    new=$(mktemp -d "$folder.new.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    chmod 755 "$new"
    say "building Helm $version: a minute or two, once"
    # The compiler flags of scripts/kubernetes.sh, so that its compiled packages are reused.
    CGO_ENABLED=0 go -C "$module" build -mod=readonly -buildvcs=false -trimpath -gcflags all=-dwarf=false -ldflags "$flags" \
      -o "$new/" helm.sh/helm/v3/cmd/helm >&2 ||
      cannot "Helm $version does not build; see the output of go above (it downloads missing sources)"
    rm -rf "$folder"
    mv "$new" "$folder"
    trap - EXIT
    say "cached in $folder"
  fi
fi
echo "$folder/helm"
