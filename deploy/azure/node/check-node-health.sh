#!/bin/sh
# Combines the last results of AzNHC, DCGM and our own checks: healthy if all passed within HEALTH_DAYS (7), unhealthy if the last
# result of one is a failure, else unknown. Writes /var/log/node-health.log and its .status.
set -u
logs=${ROOT:-}/var/log
oldest=$(($(date +%s) - ${HEALTH_DAYS:-7} * 86400))

last() {
  status=
  time=
  [ -r "$logs/$1.log.status" ] && read -r time status _ <<EOF
$(tail -n 1 "$logs/$1.log.status")
EOF
  case $status in
    failed) echo failed ;;
    passed)
      # A time that cannot be parsed counts as none.
      time=$(date -d "$time" +%s 2>/dev/null) || time=0
      if [ "$time" -ge "$oldest" ]; then echo passed; else echo unknown; fi
      ;;
    *) echo unknown ;;
  esac
}

aznhc=$(last aznhc-health) dcgmi=$(last dcgmi-diag) doctor=$(last doctor-check)
case "$aznhc $dcgmi $doctor" in
  *failed*) health=unhealthy ;;
  "passed passed passed") health=healthy ;;
  *) health=unknown ;;
esac
now=$(date -u '+%Y-%m-%dT%H:%M:%SZ')
echo "$now $health" >>"$logs/node-health.log.status"
echo "$now AzNHC: $aznhc, DCGM: $dcgmi, Cluster Doctor: $doctor, together: $health" >>"$logs/node-health.log"
