#!/bin/sh
# Installs doctor-node on this machine, once: downloads it from URL and installs it only if its checksum is SHA256.
#   install-doctor-node.sh URL SHA256
set -eu
url=$1 sha256=$2 program=${DOCTOR_NODE:-/usr/local/bin/doctor-node}

right() { echo "$sha256  $1" | sha256sum --check --status 2>/dev/null; }

if [ -x "$program" ] && right "$program"; then exit 0; fi
new=$(mktemp "$program.XXXXXX")
trap 'rm -f "$new"' EXIT
curl --proto '=https' --fail --silent --show-error --location --retry 5 --max-time 600 --output "$new" "$url"
if ! right "$new"; then
  echo "$url: the SHA-256 checksum is not $sha256; not installed" >&2
  exit 1
fi
chmod 755 "$new"
mv "$new" "$program"
