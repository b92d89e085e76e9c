#!/bin/sh
# shellcheck disable=SC1091,SC2154 # part and code are set by health-notes.sh
# NVIDIA's diagnostic at level 2, or at the given level (1 to 4): /var/log/dcgmi-diag.log and its .status.
set -u
. "${ROOT:-}/opt/health-notes.sh"
level=${1:-2}
case $level in
  [1-4]) ;;
  *)
    echo "invalid level of dcgmi diag: $level; expected 1 to 4" >&2
    exit 2
    ;;
esac
begin dcgmi-diag
run dcgmi diag -r "$level" -v
# Each test has a row with its result; a failed one counts whatever the exit code. Tests of the installation, such as all of level
# 1, prove nothing about the hardware: that has passed only with the memory or PCIe test.
if grep -q '| *Fail' "$part"; then
  note failed "dcgmi diag failed with exit code $code"
elif [ "$code" -eq 0 ] && grep -Eqi '^\| *(gpu )?(memory|pcie)[^|]*\|[^|]*Pass' "$part"; then
  note passed "dcgmi diag passed"
else
  note unknown "dcgmi diag failed with exit code $code"
fi
