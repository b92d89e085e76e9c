#!/usr/bin/env bash
# Installs, uses, upgrades and removes the packages on a machine of scripts/machine.sh. The last line is `ok`.
#   scenario.sh deb|rpm
#
# /shared has `old` and `new`, the packages of both versions, and `v0.2.0.db`, a controller's database of v0.2.0.
set -eEuo pipefail

format=$1
config=/etc/cluster-doctor
state=/var/lib/cluster-doctor
units=(doctor.service doctor-run.service doctor-run.timer doctor-node-agent.service)
trap 'echo "FAILED: ${BASH_SOURCE[0]}:$LINENO: $BASH_COMMAND"' ERR

step() { echo "-- ${SECONDS}s: $*"; }
fail() {
  echo "FAILED: $*"
  journalctl --quiet --no-pager --lines 40 --unit doctor.service --unit doctor-node-agent.service || true
  exit 1
}

expect() { # what is expected, command
  "${@:2}" || fail "$1"
}

equal() { # what, actual, expected
  [ "$2" = "$3" ] || fail "$1: found \`$2\`, expected \`$3\`"
}

# Waits until a command succeeds, a minute at most: the machine may be slow.
await() { # what is expected, command
  local tries
  for ((tries = 0; tries < 300; tries++)); do
    if "${@:2}" >/dev/null 2>&1; then return; fi
    sleep 0.2
  done
  "${@:2}" || true
  fail "not within a minute: $1"
}

# Prints the numbers of processes whose program is the given file, also if that has been replaced.
processes() { # program
  local link exe
  for link in /proc/[0-9]*/exe; do
    exe=$(readlink "$link" 2>/dev/null) || continue
    if [ "${exe% (deleted)}" = "$1" ]; then basename "$(dirname "$link")"; fi
  done
}

is_running() { # unit
  equal "$1" "$(systemctl is-active "$1" || true)" active
}

is_stopped() { # unit...
  local unit
  for unit in "$@"; do equal "$unit" "$(systemctl is-active "$unit" || true)" inactive; done
}

main_process() { # unit
  systemctl show --property MainPID --value "$1"
}

# The unit's process runs the installed file, not one that an upgrade has replaced.
runs_installed_program() { # unit, program
  is_running "$1"
  equal "program of $1" "$(readlink "/proc/$(main_process "$1")/exe")" "$2"
}

file_is() { # path, `mode owner group`
  equal "$1" "$(stat -c '%a %U %G' "$1")" "$2"
}

if [ "$format" = deb ]; then
  install_packages() { # version, package...
    local one files=()
    for one in "${@:2}"; do files+=("/shared/$1/${one}"_*.deb); done
    # As an unattended upgrade: a changed file stays, and nothing is asked.
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold \
      install -y --no-install-recommends --reinstall "${files[@]}" >/tmp/apt.log 2>&1 </dev/null ||
      { cat /tmp/apt.log && fail "apt-get install ${files[*]}"; }
  }
  remove_package() {
    apt-get -qq remove -y "$1" >/tmp/apt.log 2>&1 || { cat /tmp/apt.log && fail "apt-get remove $1"; }
  }
  version_of() { dpkg-query -f '${Version}' -W "$1"; }
  left_beside=dpkg-dist
else
  install_packages() { # version, package...
    local one files=()
    for one in "${@:2}"; do files+=("/shared/$1/${one}"-[0-9]*.rpm); done
    rpm --force-debian --upgrade --replacepkgs "${files[@]}" >/tmp/rpm.log 2>&1 ||
      { cat /tmp/rpm.log && fail "rpm --upgrade ${files[*]}"; }
  }
  remove_package() {
    rpm --force-debian --erase "$1" >/tmp/rpm.log 2>&1 || { cat /tmp/rpm.log && fail "rpm --erase $1"; }
  }
  version_of() { rpm --force-debian -q --queryformat '%{VERSION}' "$1"; }
  left_beside=rpmnew
fi

# Prints every file that packages may leave behind.
all_files() {
  find / -xdev \( -path /var/lib/dpkg -o -path /var/lib/rpm -o -path /var/lib/apt -o -path /var/cache -o -path /var/log -o -path /tmp \
    -o -path /var/lib/systemd -o -path '/etc/*-' -o -path /etc/.pwd.lock \) -prune -o -print | sort
}

nothing_runs_or_will() {
  is_stopped "${units[@]}"
  local unit
  for unit in doctor.service doctor-run.timer doctor-node-agent.service; do
    equal "is-enabled $unit" "$(systemctl is-enabled "$unit" || true)" disabled
  done
  equal "processes" "$(processes /usr/bin/doctor)$(processes /usr/bin/doctor-node)" ""
}

settings_in_force() { # configuration
  doctor config show --config "$1" | grep -v -e '^# /' -e '^policy = '
}

check_installation() {
  local file
  step "nothing has been started, or will be at the next boot"
  nothing_runs_or_will

  step "the user has no shell, no password, no other group and no rights by sudo"
  equal user "$(getent passwd cluster-doctor | cut -d : -f 5-)" "Cluster Doctor controller:$state:/usr/sbin/nologin"
  equal groups "$(id -Gn cluster-doctor)" cluster-doctor
  expect "no password" grep -q '^cluster-doctor:[!*]' /etc/shadow
  if grep -rq cluster-doctor /etc/sudoers /etc/sudoers.d 2>/dev/null; then fail "the user is in sudoers"; fi

  step "owners and modes"
  file_is $config "755 root root"
  file_is $config/doctor.toml "640 root cluster-doctor"
  file_is $config/policy.toml "644 root root"
  file_is $state "750 cluster-doctor cluster-doctor"
  file_is $state/data "750 cluster-doctor cluster-doctor"
  for file in /usr/bin/doctor /usr/bin/doctor-node /usr/lib/cluster-doctor/slurm/{health,prolog,epilog}; do
    file_is "$file" "755 root root"
  done

  step "programs, manual pages, completions"
  doctor --version >/dev/null
  doctor-node --version >/dev/null
  expect "manual pages" gzip -t /usr/share/man/man1/{doctor,doctor-serve,doctor-node,doctor-node-agent}.1.gz
  expect "completions" bash -n /usr/share/bash-completion/completions/doctor
  expect "completions" bash -n /usr/share/bash-completion/completions/doctor-node
  expect "licences" grep -q '^libsqlite3-sys ' <(gzip -dc /usr/share/doc/cluster-doctor/THIRD-PARTY.gz)
  # The hook itself needs Slurm; that it begins is enough.
  expect "Slurm's hooks start doctor-node" grep -qx 'exec /usr/bin/doctor-node hook health' /usr/lib/cluster-doctor/slurm/health

  step "the configuration is valid for the service, and is that of the program"
  runuser -u cluster-doctor -- doctor config check >/tmp/check.log || { cat /tmp/check.log && fail "doctor config check"; }
  doctor config init /tmp/defaults >/dev/null
  settings_in_force /tmp/defaults/doctor.toml >/tmp/settings
  expect "the same settings as without the files" cmp /tmp/settings <(settings_in_force $config/doctor.toml)
  rm -r /tmp/defaults

  step "systemd accepts the units"
  systemd-analyze verify --man=no "${units[@]/#//usr/lib/systemd/system/}" 2>&1 | tee /tmp/verify.log
  equal "systemd-analyze verify" "$(cat /tmp/verify.log)" ""
  sed 's/^ProtectSystem=/ProtectSytem=/' /usr/lib/systemd/system/doctor.service >/tmp/wrong.service
  expect "systemd finds a wrong unit" grep -q ProtectSytem <(systemd-analyze verify --man=no /tmp/wrong.service 2>&1 || true)

  step "the agent does not start without its credential"
  systemctl start doctor-node-agent.service
  is_stopped doctor-node-agent.service
}

leads() { doctor db lease show; }
agent_has_reported() { doctor agent list --json | grep -q '"state": "reports"'; }
# The running agent has read its settings and credential. Its first message after a restart may be the heartbeat, a minute later.
agent_is_up() { journalctl --quiet "_PID=$(main_process doctor-node-agent.service)" | grep -q 'reporting as machine to'; }

# Starts the controller, and an agent on the same machine.
use() {
  local status id
  step "a single cycle makes the database"
  # Nothing is tested on this machine: it is always busy.
  printf '%s\n' '[agents]' 'listen = "127.0.0.1:7443"' '[backend.local]' 'busy_file = "/etc/cluster-doctor/busy"' >>$config/doctor.toml
  touch $config/busy
  systemctl start doctor-run.service
  file_is $state/doctor.db "600 cluster-doctor cluster-doctor"
  if [ -e $state/agent/kept ]; then file_is $state/agent/kept "600 root root"; fi

  step "configured and enabled, the controller leads, as its user without privileges"
  sed -i 's/^# cycle = "30s"$/cycle = "1s"/' $config/doctor.toml
  systemctl enable --quiet --now doctor.service
  await "the controller leads" leads
  runs_installed_program doctor.service /usr/bin/doctor
  status=/proc/$(main_process doctor.service)/status
  id=$(id -u cluster-doctor)
  equal "user of the controller" "$(awk '$1 == "Uid:" { print $2, $3, $4 }' "$status")" "$id $id $id"
  equal "capabilities" "$(awk '$1 == "CapEff:" { print $2 }' "$status")" 0000000000000000
  equal "no new privileges" "$(awk '$1 == "NoNewPrivs:" { print $2 }' "$status")" 1
  file_is $state "750 cluster-doctor cluster-doctor"

  step "its user and root read and change, others do not"
  systemd-sysusers --inline 'u ann - "" / /bin/sh' >/dev/null
  runuser -u cluster-doctor -- doctor nodes >/dev/null
  runuser -u cluster-doctor -- doctor hold machine --why test --yes >/dev/null
  doctor release machine --why test --yes >/dev/null
  if runuser -u ann -- doctor nodes >/dev/null 2>&1; then fail "another user reads the database"; fi
  if runuser -u ann -- cat $config/doctor.toml >/dev/null 2>&1; then fail "another user reads the configuration"; fi

  step "an enrolled agent reports"
  doctor agent enroll machine --out /tmp/keys --yes >/dev/null
  install -m 600 /tmp/keys/machine.key $config/agent.key
  systemctl enable --quiet --now doctor-node-agent.service
  await "the agent reports" agent_has_reported
  runs_installed_program doctor-node-agent.service /usr/bin/doctor-node
  file_is $state/agent "700 root root"
  systemctl reload doctor-node-agent.service
  is_running doctor-node-agent.service
}

upgrade() {
  local controller agent edited
  step "an upgrade restarts what ran, keeps the edited configuration, and enables nothing"
  controller=$(main_process doctor.service) agent=$(main_process doctor-node-agent.service)
  edited=$(sha256sum $config/doctor.toml)
  install_packages new cluster-doctor cluster-doctor-node
  equal version "$(version_of cluster-doctor) $(version_of cluster-doctor-node)" "0.3.0 0.3.0"
  equal "edited configuration" "$(sha256sum $config/doctor.toml)" "$edited"
  file_is $config/doctor.toml "640 root cluster-doctor"
  # The default of the old package had one line more.
  expect "the new default beside it" test -e $config/doctor.toml.$left_beside
  if grep -q v0.2.0 $config/doctor.toml.$left_beside; then fail "the default beside the edited file is the old one"; fi
  if grep -q v0.2.0 $config/policy.toml; then fail "a file that was not edited did not get the new default"; fi
  expect "no other copies" test ! -e $config/policy.toml.$left_beside
  rm $config/doctor.toml.$left_beside
  runs_installed_program doctor.service /usr/bin/doctor
  runs_installed_program doctor-node-agent.service /usr/bin/doctor-node
  [ "$(main_process doctor.service)" != "$controller" ] || fail "the controller was not restarted"
  [ "$(main_process doctor-node-agent.service)" != "$agent" ] || fail "the agent was not restarted"
  equal "enabled timer" "$(systemctl is-enabled doctor-run.timer || true)" disabled
  await "the controller leads again" leads
  await "the agent is up again" agent_is_up

  step "what was stopped stays stopped"
  systemctl stop doctor.service doctor-node-agent.service
  install_packages new cluster-doctor cluster-doctor-node
  is_stopped "${units[@]}"
}

another_user() {
  step "another user of the unit gets the state, and reads the configuration"
  mkdir /etc/systemd/system/doctor.service.d
  printf '%s\n' '[Service]' User=ann >/etc/systemd/system/doctor.service.d/user.conf
  systemctl daemon-reload
  systemctl start doctor.service
  await "the controller leads" leads
  is_running doctor.service
  file_is $state/doctor.db "600 ann ann"
  systemctl stop doctor.service
  rm -r /etc/systemd/system/doctor.service.d
  systemctl daemon-reload
  systemctl start doctor.service
  await "the controller leads" leads
  file_is $state/doctor.db "600 cluster-doctor cluster-doctor"
  systemctl stop doctor.service
}

history() { doctor history --json; }

store_of_v020() {
  step "a database of v0.2.0 is migrated, after a backup"
  rm -f $state/doctor.db*
  install -m 600 -o cluster-doctor -g cluster-doctor /shared/v0.2.0.db $state/doctor.db
  systemctl start doctor.service
  await "the controller leads" leads
  file_is $state/doctor.db.schema-12.bak "600 cluster-doctor cluster-doctor"
  doctor db verify >/dev/null || fail "doctor db verify"
  systemctl stop doctor.service
  history >/tmp/history.json
  expect "history of v0.2.0" test "$(stat -c %s /tmp/history.json)" -gt 10000
}

removal() {
  step "a removal stops and disables the controller, and keeps configuration, state and user"
  systemctl start doctor.service doctor-node-agent.service
  await "the controller leads" leads
  remove_package cluster-doctor
  equal "processes" "$(processes /usr/bin/doctor)" ""
  expect "no program" test ! -e /usr/bin/doctor -a ! -e /usr/lib/systemd/system/doctor.service
  equal "links of the unit" "$(find /etc/systemd/system -name 'doctor.service' -o -name 'doctor-run.*')" ""
  file_is $state/doctor.db "600 cluster-doctor cluster-doctor"
  is_running doctor-node-agent.service
  if [ "$format" = deb ]; then
    expect "the edited configuration" grep -q busy_file $config/doctor.toml
  else
    expect "the edited configuration" grep -q busy_file $config/doctor.toml.rpmsave
    expect "no other configuration" test ! -e $config/doctor.toml
  fi

  step "installed again, the controller is not started, and has its history"
  install_packages new cluster-doctor
  is_stopped doctor.service doctor-run.service doctor-run.timer
  equal "is-enabled" "$(systemctl is-enabled doctor.service || true)" disabled
  [ "$format" = deb ] || mv $config/doctor.toml.rpmsave $config/doctor.toml
  file_is $config/doctor.toml "640 root cluster-doctor"
  expect "the same history" cmp /tmp/history.json <(history)
}

purge_of_debian() {
  step "a purge deletes the controller's state, but nothing that is mounted there, and nothing of the agent"
  systemctl start doctor.service
  await "the controller leads" leads
  mount -t tmpfs share $state/data
  echo kept >$state/data/of-another-machine
  apt-get -qq purge -y cluster-doctor >/dev/null
  equal "processes" "$(processes /usr/bin/doctor)" ""
  equal "state" "$(cd $state && echo *)" "agent data"
  equal "what is mounted" "$(cat $state/data/of-another-machine)" kept
  equal "configuration" "$(cd $config && echo *)" "agent.key busy"
  is_running doctor-node-agent.service
  umount $state/data
  rm -r $state/data

  step "a purge of the node's package deletes its state and its credential"
  apt-get -qq purge -y cluster-doctor-node >/dev/null
  equal "processes" "$(processes /usr/bin/doctor-node)" ""
  rm $config/busy
  rmdir $config
  equal "state" "$(ls -d $state 2>/dev/null || true)" ""
}

end_of_rpm() {
  step "after both packages are erased, state and edited configuration are left, and nothing else"
  rm $config/busy
  remove_package cluster-doctor
  remove_package cluster-doctor-node
  equal "processes" "$(processes /usr/bin/doctor)$(processes /usr/bin/doctor-node)" ""
  equal "configuration" "$(cd $config && echo *)" "agent.key doctor.toml.rpmsave"
  expect "state" test -e $state/doctor.db -a -e $state/agent
  # As docs/guide/packages.md says.
  rm -r $config $state
}

# The archive, installed as docs/guide/packages.md says.
archive() {
  step "the archive works without a package manager"
  tar --extract --no-same-owner --strip-components=1 --directory /usr --file /shared/new/cluster-doctor-*.tar.gz
  systemd-sysusers cluster-doctor.conf
  install -d -m 750 -o cluster-doctor -g cluster-doctor $state $state/data
  install -D -m 640 -g cluster-doctor -t $config /usr/share/doc/cluster-doctor/examples/doctor.toml
  install -m 644 -t $config /usr/share/doc/cluster-doctor/examples/policy.toml
  check_installation
}

if [ "$format" = rpm ]; then
  step "rpm refuses the packages where nothing provides their libraries"
  if rpm --force-debian --install --test /shared/old/*.rpm 2>/tmp/missing.log; then fail "the packages require nothing"; fi
  expect "glibc is required" grep -q 'libc.so.6(GLIBC_2.*)(64bit) is needed by cluster-doctor-node' /tmp/missing.log
  rpm --force-debian --install /shared/base.rpm
  # It is there on every rpm distribution.
  mkdir -p /usr/share/licenses
fi
before=$(all_files)
if [ "$format" = rpm ]; then
  # The machine was a node before it got a controller.
  install -d -m 700 $state/agent
  install -m 600 /dev/null $state/agent/kept
fi
install_packages old cluster-doctor cluster-doctor-node
equal version "$(version_of cluster-doctor) $(version_of cluster-doctor-node)" "0.2.0 0.2.0"
check_installation
use
upgrade
another_user
store_of_v020
removal
if [ "$format" = deb ]; then purge_of_debian; else end_of_rpm; fi
step "no file is left"
equal "files that are left" "$(comm -13 <(echo "$before") <(all_files))" ""
if [ "$format" = deb ]; then archive; fi
echo ok
