#!/usr/bin/env bash
# Builds the Kubernetes components for tests. Prints their folder; all other output is on standard error.
#   kubernetes.sh             the control plane: kube-apiserver, kube-controller-manager, kube-scheduler and etcd
#   kubernetes.sh kubelet     the kubelet, for tests with a real node
#
# KUBEBUILDER_ASSETS, if set, is that folder; it usually has no kubelet, which is then built. Otherwise Go builds the components
# from crates/bed/kubernetes, which pins them (no distribution packages them), and etcd is the distribution's, or is unpacked from
# its package without being installed. That takes ten minutes once, and one more for the kubelet; the result is kept under
# DOCTOR_BED_CACHE by the hash of go.sum and of the list of programs.
#
# If this cannot run, the last line is the reason: "not run: …", exit 3, or exit 1 with CI=true.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-control-plane} in
control-plane)
  programs=(kube-apiserver kube-controller-manager kube-scheduler)
  packages=(etcd)
  ;;
kubelet)
  programs=(kubelet)
  packages=()
  ;;
*)
  echo "usage: kubernetes.sh [control-plane|kubelet]" >&2
  exit 2
  ;;
esac
module=crates/bed/kubernetes

say() { echo "$*" >&2; }

cannot() {
  say "not run: $*"
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

# Prints the programs that are missing in a folder.
missing_in() {
  local name
  for name in "${programs[@]}" "${packages[@]}"; do [ -x "$1/$name" ] || echo "$name"; done
}

if [ -n "${KUBEBUILDER_ASSETS:-}" ]; then
  missing=$(missing_in "$KUBEBUILDER_ASSETS" | xargs)
  if [ -z "$missing" ]; then
    echo "$KUBEBUILDER_ASSETS"
    exit 0
  fi
  [ "$missing" = kubelet ] ||
    cannot "KUBEBUILDER_ASSETS names $KUBEBUILDER_ASSETS, which has no $missing; put it there, or unset the variable to build all"
fi

cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
version=$(sed -n 's|^\s*k8s.io/kubernetes \(v[0-9.]*\).*|\1|p' "$module/go.mod")
folder=$cache/kubernetes-$version-$({ cat "$module/go.sum" && echo "${programs[@]}" "${packages[@]}"; } | sha256sum | cut -c 1-16)

build() { # into
  local stamp=k8s.io/component-base/version flags name commands=() number=${version#v}
  flags="-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=${number%%.*}"
  flags+=" -X $stamp.gitMinor=$(cut -d . -f 2 <<<"$number")"
  for name in "${programs[@]}"; do commands+=("k8s.io/kubernetes/cmd/$name"); done
  say "building ${programs[*]} $version: minutes, once"
  # Without debug information, which is a twelfth of the compiler's work.
  CGO_ENABLED=0 go -C "$module" build -mod=readonly -buildvcs=false -trimpath -gcflags all=-dwarf=false -ldflags "$flags" \
    -o "$1/" "${commands[@]}" >&2 ||
    cannot "Kubernetes $version does not build; go says why above (it downloads the sources when it has not got them)"
}

# Unpacking needs no root, and no service has to be kept from starting.
unpack_etcd() { # into
  say "fetching the package etcd-server"
  rm -rf "$1/package" && mkdir "$1/package" &&
    (cd "$1/package" && apt-get -qq -o APT::Sandbox::User=root download etcd-server >&2 && dpkg-deb --extract ./*.deb .) &&
    mv "$1/package/usr/bin/etcd" "$1/etcd" && rm -rf "$1/package"
}

update_packages() {
  # Two concurrent apt-get runs break each other despite dpkg's own lock; this is the lock of scripts/system.sh.
  [ "$(id -u)" -eq 0 ] && flock /var/lock/cluster-doctor-apt.lock apt-get -o DPkg::Lock::Timeout=300 -qq update >&2
}

bring_etcd() { # into
  local installed
  if installed=$(command -v etcd); then
    cp "$(readlink -f "$installed")" "$1/etcd"
    return
  fi
  if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    cannot "etcd is not installed, and this is no Debian or Ubuntu whose package etcd-server could be fetched: install etcd 3.4 or newer"
  fi
  # In a fresh container the package list may be missing or old: retry with a new one.
  unpack_etcd "$1" || { update_packages && unpack_etcd "$1"; } ||
    cannot "the package etcd-server cannot be fetched; apt says why above (sudo apt-get install etcd-server)"
}

if [ -n "$(missing_in "$folder")" ]; then
  mkdir -p "$cache"
  # A concurrent run waits here and finds it done.
  exec 9>"$folder.lock"
  flock 9
  if [ -n "$(missing_in "$folder")" ]; then
    command -v go >/dev/null ||
      cannot "building ${programs[*]} needs Go, which is not installed (1.26 or newer; any from 1.21 fetches that)"
    new=$(mktemp -d "$folder.new.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    chmod 755 "$new"
    [ ${#packages[@]} -eq 0 ] || bring_etcd "$new"
    build "$new"
    rm -rf "$folder"
    mv "$new" "$folder"
    trap - EXIT
    say "kept in $folder"
  fi
fi
echo "$folder"
