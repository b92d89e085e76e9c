#!/usr/bin/env bash
# Builds the Kubernetes components for tests. Prints their folder; all other output is on standard error.
#   kubernetes.sh             the control plane: kube-apiserver, kube-controller-manager, kube-scheduler and etcd
#   kubernetes.sh kubelet     the kubelet, for tests with a real node
#
# KUBEBUILDER_ASSETS, if set, is that folder; it usually has no kubelet, which is then built. Otherwise Go builds the components
# from crates/testbed/kubernetes, which pins them: no distribution packages Kubernetes, and Debian 12's etcd is older than this Kubernetes
# supports (streamed lists never end with it). That takes nine minutes once, and one more for the kubelet; the result is kept under
# DOCTOR_BED_CACHE by the hash of go.sum and of the list of programs.
#
# If this cannot run, the last line is the reason: "not run: …", exit 3, or exit 1 with CI=true.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-control-plane} in
control-plane)
  programs=(etcd kube-apiserver kube-controller-manager kube-scheduler)
  ;;
kubelet)
  programs=(kubelet)
  ;;
*)
  echo "usage: kubernetes.sh [control-plane|kubelet]" >&2
  exit 2
  ;;
esac
module=crates/testbed/kubernetes

say() { echo "$*" >&2; }

cannot() {
  say "not run: $*"
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

# Prints the programs that are missing in a folder.
missing_in() {
  local name
  for name in "${programs[@]}"; do [ -x "$1/$name" ] || echo "$name"; done
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
folder=$cache/kubernetes-$version-$({ cat "$module/go.sum" && echo "${programs[@]}"; } | sha256sum | cut -c 1-16)

compile() { # linker flags, output, packages...
  local flags=$1 output=$2
  shift 2
  # Without debug information, which is a twelfth of the compiler's work.
  CGO_ENABLED=0 go -C "$module" build -mod=readonly -buildvcs=false -trimpath -gcflags all=-dwarf=false -ldflags "-s -w $flags" \
    -o "$output" "$@" >&2 ||
    cannot "$* does not build; see the output of go above (it downloads missing sources)"
}

build() { # into
  local stamp=k8s.io/component-base/version flags name commands=() number=${version#v}
  flags="-X $stamp.gitVersion=$version -X $stamp.gitMajor=${number%%.*} -X $stamp.gitMinor=$(cut -d . -f 2 <<<"$number")"
  say "building ${programs[*]}, Kubernetes $version: minutes, once"
  for name in "${programs[@]}"; do
    [ "$name" = etcd ] || commands+=("k8s.io/kubernetes/cmd/$name")
  done
  compile "$flags" "$1/" "${commands[@]}"
  if [ "${programs[0]}" = etcd ]; then compile "" "$1/etcd" go.etcd.io/etcd/server/v3; fi
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
    build "$new"
    rm -rf "$folder"
    mv "$new" "$folder"
    trap - EXIT
    say "cached in $folder"
  fi
fi
echo "$folder"
