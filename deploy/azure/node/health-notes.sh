# shellcheck shell=sh
# How a check of this machine leaves its result, for the scripts beside it: its output at the end of /var/log/NAME.log, and a line in
# /var/log/NAME.log.status with a time and `passed`, `failed` or `unknown`. Then all results are summed up anew.
#
# Only a check that ran and says so has passed. One that is not installed, could not run or said nothing that can be believed is unknown.

now() { date -u '+%Y-%m-%dT%H:%M:%SZ'; }

# begin NAME: nobody else runs the same check meanwhile.
begin() {
  log=${ROOT:-}/var/log/$1.log
  exec 9>>"$log.lock"
  if ! flock -n 9; then
    echo "$1 is being run already" >&2
    exit 3
  fi
  part=$(mktemp)
  trap 'rm -f "$part"' EXIT
}

# run WORDS...: what it prints is kept, how it ends is in $code.
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
