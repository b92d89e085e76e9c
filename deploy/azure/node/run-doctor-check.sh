#!/bin/sh
# shellcheck disable=SC1091,SC2154 # code is set by health-notes.sh
# Our own quick checks: /var/log/doctor-check.log and its .status.
set -u
. "${ROOT:-}/opt/health-notes.sh"
begin doctor-check
run "${DOCTOR_NODE:-/usr/local/bin/doctor-node}" check
# 0 no finding, 1 a finding to monitor, 2 a finding that takes the machine out of service, anything else: unknown.
case $code in
  0 | 1) note passed "doctor-node check passed (exit code $code)" ;;
  2) note failed "doctor-node check failed with exit code 2" ;;
  *) note unknown "doctor-node check failed with exit code $code" ;;
esac
