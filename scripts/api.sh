#!/usr/bin/env bash
# Tests the API against its own description: schemathesis reads openapi.json from a running controller (a small simulated cluster)
# and sends requests that the description allows or forbids. Responses must have the described form, and none may be a server
# error. schemathesis is fetched once and kept under DOCTOR_BED_CACHE. `doctor` must be built.
#
# If this cannot run, the last line is the reason: "NOT RUN: …"; with CI=true that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(schemathesis==4.32.5)
# Inputs for each operation; the same ones every time.
examples=${EXAMPLES:-25}

cannot() {
  echo "NOT RUN: the API against its description: $*" >&2
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}

cache=${DOCTOR_BED_CACHE:-${HOME:?is where the cache is kept unless DOCTOR_BED_CACHE names a folder}/.cache/cluster-doctor-beds}
folder=$cache/api-$(printf '%s\n' "${packages[@]}" | sha256sum | cut -c 1-16)
if [ ! -x "$folder/whole" ]; then
  mkdir -p "$cache"
  # A concurrent run waits here and finds it done.
  exec 9>"$folder.lock"
  flock 9
  if [ ! -x "$folder/whole" ]; then
    python3 -c 'import venv, ensurepip' 2>/dev/null ||
      cannot "Python 3 with venv is not installed (apt-get install python3-venv)"
    echo "fetching schemathesis: a minute, once" >&2
    rm -rf "$folder"
    python3 -m venv "$folder" >&2
    "$folder/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" >&2 ||
      { rm -rf "$folder"; cannot "schemathesis cannot be fetched; see the output of pip above"; }
    install -m 755 /dev/null "$folder/whole"
  fi
fi

doctor=$(realpath "${CARGO_TARGET_DIR:-target}/debug/doctor")
[ -x "$doctor" ] || cannot "$doctor is not built (cargo build)"
work=$(mktemp -d)
demo=
# The demonstration writes to the folder until it has ended.
end_demo() {
  if [ -n "$demo" ]; then kill "$demo" 2>/dev/null || true; wait "$demo" || true; fi
  rm -rf "$work"
}
trap end_demo EXIT
cd "$work"
"$doctor" demo --nodes 12 --days 2 --quiet --dir demo --serve --listen 127.0.0.1:0 --speed 60 --json >told 2>said &
demo=$!
for _ in $(seq 600); do
  if [ -s told ]; then break; fi
  kill -0 "$demo" 2>/dev/null || { cat said >&2; echo "the demonstration ended" >&2; exit 1; }
  sleep 0.2
done
url=$(sed -n 's|.*"url": *"\([^"]*\)/api/v1/".*|\1|p' told)
[ -n "$url" ] || { cat told said >&2; echo "the demonstration does not print its address" >&2; exit 1; }
token=$("$doctor" token create check --role operator --yes --json --store demo/doctor.db | sed -n 's|.*"token": *"\([^"]*\)".*|\1|p')

# Event streams never end, and stateful sequences are tested elsewhere: both would only take time.
"$folder/bin/schemathesis" run "$url/api/v1/openapi.json" \
  --header "Authorization: Bearer $token" \
  --exclude-path /api/v1/events \
  --phases examples,coverage,fuzzing --max-examples "$examples" --seed 1 --workers 2 --request-timeout 20 \
  --checks not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,ignored_auth \
  --no-color
