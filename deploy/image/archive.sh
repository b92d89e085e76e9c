#!/usr/bin/env bash
# Builds an image without Docker: the archive that `docker load`, `podman load` and `ctr images import` read.
#   archive.sh NAME CONFIG OUT LAYER...     CONFIG is the image's configuration as JSON, each LAYER a folder or a tar of one; OUT may be -
set -euo pipefail

[ $# -ge 4 ] || { sed -n '3s/^# *//p' "$0" >&2 && exit 2; }
name=$1 config=$2 out=$3
shift 3

# Constant, so that the same content gives the same image.
created=1970-01-01T00:00:00Z
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case $(uname -m) in
x86_64) processor=amd64 ;;
aarch64) processor=arm64 ;;
*) processor=$(uname -m) ;;
esac

files=() layers="" digests="" history=""
for layer in "$@"; do
  file=layer-${#files[@]}.tar
  files+=("$file")
  if [ -d "$layer" ]; then
    # The same content gives the same layer, independent of user and time.
    tar --create --file "$work/$file" --directory "$layer" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 .
  else
    ln -s "$(realpath "$layer")" "$work/$file"
  fi
  layers+="${layers:+,}\"$file\""
  # Builders of derived images count the layers by this.
  history+="${history:+,}{\"created\":\"$created\",\"created_by\":\"${0##*/}\"}"
  digests+="${digests:+,}\"sha256:$(sha256sum <"$work/$file" | cut -d ' ' -f 1)\""
done
cat >"$work/config.json" <<JSON
{"architecture":"$processor","os":"linux","created":"$created","config":$config,
"rootfs":{"type":"layers","diff_ids":[$digests]},"history":[$history]}
JSON
echo "[{\"Config\":\"config.json\",\"RepoTags\":[\"$name\"],\"Layers\":[$layers]}]" >"$work/manifest.json"
tar --create --dereference --file "$out" --directory "$work" manifest.json config.json "${files[@]}"
