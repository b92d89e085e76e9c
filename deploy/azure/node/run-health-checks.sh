#!/bin/sh
# All three, one after the other; each has its own log and status, and one that fails keeps none from running. Rerun it whenever wanted.
"${ROOT:-}"/opt/run-doctor-check.sh
"${ROOT:-}"/opt/run-aznhc.sh
"${ROOT:-}"/opt/run-dcgmi.sh
exit 0
