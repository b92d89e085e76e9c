#!/bin/sh
# Runs all three checks, one after the other; each has its own log and status, and a failure does not stop the others. Safe to
# rerun.
"${ROOT:-}"/opt/run-doctor-check.sh
"${ROOT:-}"/opt/run-aznhc.sh
"${ROOT:-}"/opt/run-dcgmi.sh
exit 0
