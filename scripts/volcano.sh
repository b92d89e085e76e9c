#!/usr/bin/env bash
# Builds Volcano's controller and scheduler and copies its CRDs, for tests that run its jobs. Prints their folder, with
# vc-controller-manager, vc-scheduler and crd/; all other output is on standard error.
#
# Go builds them once from Volcano's own module, which pins its dependencies (this file pins the version): the result is kept
# under DOCTOR_BED_CACHE by the hash of this file. That takes a few minutes.
#
# If this cannot run, the last line is the reason: "not run: …", exit 3, or exit 1 with CI=true.
set -euo pipefail
cd "$(dirname "$0")/.."

version=v1.10.0

say() { echo "$*" >&2; }

cannot() {
  say "not run: $*"
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
folder=$cache/volcano-$version-$(sha256sum scripts/volcano.sh | cut -c 1-16)

# Prints the folder of the sources that Go has downloaded.
sources() {
  local told
  if ! told=$(cd "$cache" && go mod download -json "volcano.sh/volcano@$version"); then
    say "$told"
    return 1
  fi
  sed -n 's|^\s*"Dir": "\(.*\)",\?$|\1|p' <<<"$told"
}

if [ ! -d "$folder" ]; then
  mkdir -p "$cache"
  # A concurrent run waits here and finds it done.
  exec 9>"$folder.lock"
  flock 9
  if [ ! -d "$folder" ]; then
    command -v go >/dev/null || cannot "Volcano is built with Go, which is not installed (1.22 or newer)"
    directory=$(sources) || cannot "Volcano $version cannot be downloaded; see the output of go above"
    new=$(mktemp -d "$folder.new.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    chmod 755 "$new"
    say "building Volcano $version: minutes, once"
    CGO_ENABLED=0 go -C "$directory" build -mod=readonly -buildvcs=false -trimpath -gcflags all=-dwarf=false -ldflags "-s -w" \
      -o "$new/" ./cmd/controller-manager ./cmd/scheduler >&2 ||
      cannot "Volcano $version does not build; see the output of go above (it downloads missing sources)"
    for part in controller-manager scheduler; do mv "$new/$part" "$new/vc-$part"; done
    mkdir "$new/crd"
    install -m 644 "$directory"/config/crd/volcano/bases/*.yaml "$new/crd/"
    mv "$new" "$folder"
    trap - EXIT
    say "cached in $folder"
  fi
fi
echo "$folder"
