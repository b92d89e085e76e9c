#!/bin/sh
# shellcheck disable=SC1091,SC2154 # part and code are set by health-notes.sh
# Our own quick checks: /var/log/doctor-check.log and its .status.
set -u
. "${ROOT:-}/opt/health-notes.sh"
begin doctor-check
run "${DOCTOR_NODE:-/usr/local/bin/doctor-node}" check
# 0 nothing found, 1 something is worth watching, 2 something takes the machine out of service, anything else: nobody knows. What is
# worth watching hides in the code that something else could not be judged; a row of the table tells, not the count at its end.
if [ "$code" -eq 1 ] && grep -q '  inconclusive  ' "$part"; then code=3; fi
case $code in
  0 | 1) note passed "doctor-node check passed (exit code $code)" ;;
  2) note failed "doctor-node check failed with exit code 2" ;;
  *) note unknown "doctor-node check failed with exit code $code" ;;
esac
