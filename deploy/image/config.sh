#!/usr/bin/env bash
# Prints the run configuration of an image as JSON for `archive.sh`. The Dockerfile has the same settings.
#   config.sh controller|node
set -euo pipefail

path='"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"'
case ${1:-} in
controller) echo "{\"User\":\"65532:65532\",\"Entrypoint\":[\"doctor\"],\"Cmd\":[\"serve\"],\"Env\":[$path]}" ;;
# The driver libraries that NVIDIA's container runtime provides.
node) echo "{\"Entrypoint\":[\"doctor-node\"],\"Env\":[$path,\"NVIDIA_DRIVER_CAPABILITIES=compute,utility\"]}" ;;
*)
  echo "usage: config.sh controller|node" >&2
  exit 2
  ;;
esac
