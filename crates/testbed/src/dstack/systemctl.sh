#!/bin/sh
# A minimal systemctl: `restart` starts the unit and returns when it answers.
[ "$1" = restart ] || exit 0
if [ -e /root/.dstack/shim.pid ]; then kill "$(cat /root/.dstack/shim.pid)" 2>/dev/null; fi
set -a
. /root/.dstack/shim.env
set +a
setsid /usr/local/bin/dstack-shim </dev/null >/root/.dstack/shim.log 2>&1 &
echo $! >/root/.dstack/shim.pid
tries=0
until curl -sf http://localhost:10998/api/healthcheck >/dev/null || [ $tries -ge 400 ]; do
  tries=$((tries + 1))
  sleep 0.05
done
