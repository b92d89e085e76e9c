#!/bin/sh
# shellcheck disable=SC1091,SC2154 # part and code are set by health-notes.sh
# Azure's own health checks: /var/log/aznhc-health.log and its .status. If they are not installed, or do not know this type of
# machine, the status is unknown.
set -u
. "${ROOT:-}/opt/health-notes.sh"
program=${AZNHC:-/opt/azurehpc/test/azurehpc-health-checks/run-health-checks.sh}
begin aznhc-health
if [ -x "$program" ]; then
  # Runs all checks instead of stopping at the first failure; its own log stays in its usual place.
  run "$program" -a -o "${program%/*}/health.log"
else
  echo "AzNHC is not installed: $program does not exist" >"$part"
  code=127
fi
# A check that could not run reports NHCNA, which is neither a failure nor a pass. The first line is printed before anything is
# checked: only the last one, or that of a check, shows that something was.
checked='Health checks completed with exit code: 0\.|nhc:  Health check passed:|Running check[ :]'
if grep 'Health check failed:' "$part" | grep -qv 'FaultCode: NHCNA'; then
  note failed "Health checks failed with exit code $code"
elif [ "$code" -eq 0 ] && grep -q '^Running health checks for Standard_' "$part" && grep -Eq "$checked" "$part" && ! grep -q 'Health check failed:' "$part"; then
  note passed "Health checks passed"
else
  note unknown "Health checks failed with exit code $code"
fi
