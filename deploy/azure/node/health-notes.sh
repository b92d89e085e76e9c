# shellcheck shell=sh
# How the check scripts beside this file record their results: the output is appended to /var/log/NAME.log, and a line with a time
# and `passed`, `failed` or `unknown` to /var/log/NAME.log.status. Then the overall health is updated.
#
# Only a check that ran and reports success has passed. One that is not installed, could not run or gave no usable result is
# unknown.

now() { date -u '+%Y-%m-%dT%H:%M:%SZ'; }

# begin NAME: locks the check against concurrent runs.
begin() {
  log=${ROOT:-}/var/log/$1.log
  exec 9>>"$log.lock"
  if ! flock -n 9; then
    echo "$1 is already running" >&2
    exit 3
  fi
  part=$(mktemp)
  trap 'rm -f "$part"' EXIT
}

# run WORDS...: runs a command, keeps its output, and sets $code to its exit code.
run() {
  "$@" 9>&- >"$part" 2>&1
  # shellcheck disable=SC2034 # for who called
  code=$?
}

# note STATUS LAST-LINE
note() {
  { cat "$part"; echo "$2"; } >>"$log"
  echo "$(now) $1" >>"$log.status"
  echo "$log: $1"
  "${ROOT:-}/opt/check-node-health.sh"
}
