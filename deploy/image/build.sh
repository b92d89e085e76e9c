#!/usr/bin/env bash
# Builds both images without Docker from compiled programs: OUT/controller.tar and OUT/node.tar, for `docker load`,
# `podman load` or `ctr --namespace k8s.io images import`.
#   build.sh DOCTOR DOCTOR-NODE OUT       TAG names their version (latest); EXTRA_PACKAGES is for the node's (rootfs.sh)
set -euo pipefail

[ $# -eq 3 ] || { sed -n '4s/^# *//p' "$0" >&2 && exit 2; }
here=$(dirname "$0") doctor=$1 doctor_node=$2 out=$3 tag=${TAG:-latest}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$out"
EXTRA_PACKAGES="" "$here/rootfs.sh" controller "$work/controller" "$doctor"
"$here/archive.sh" "cluster-doctor:$tag" "$("$here/config.sh" controller)" "$out/controller.tar" "$work/controller"
"$here/rootfs.sh" node "$work/node" "$doctor_node"
"$here/archive.sh" "cluster-doctor-node:$tag" "$("$here/config.sh" node)" "$out/node.tar" "$work/node"
ls -l "$out"
