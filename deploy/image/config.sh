#!/usr/bin/env bash
# How an image of ours is run, as JSON for `archive.sh`. The Dockerfile says the same in its own words.
#   config.sh controller|node
set -euo pipefail

path='"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"'
case ${1:-} in
controller) echo "{\"User\":\"65532:65532\",\"Entrypoint\":[\"doctor\"],\"Cmd\":[\"serve\"],\"Env\":[$path]}" ;;
# NVIDIA's runtime brings the libraries of the driver that belong to these.
node) echo "{\"Entrypoint\":[\"doctor-node\"],\"Env\":[$path,\"NVIDIA_DRIVER_CAPABILITIES=compute,utility\"]}" ;;
*)
  echo "usage: config.sh controller|node" >&2
  exit 2
  ;;
esac
