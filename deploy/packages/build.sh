#!/usr/bin/env bash
# Makes packages of both programs from programs that exist already: .deb, .rpm and .tar.gz, into OUT.
#   build.sh PROGRAMS PROCESSOR VERSION OUT [KIND...]
#
# PROGRAMS is a directory with `doctor` and `doctor-node`, PROCESSOR is x86_64 or aarch64. KIND is `controller` (doctor), `node`
# (doctor-node) or `archive` (the .tar.gz with both); default: all three. The same inputs and tools give the same bytes.
#
# DOCTOR             a `doctor` of the same version that runs on this machine (default: PROGRAMS/doctor). It prints manual pages,
#                    completions, the default configuration and Slurm's hooks
# SOURCE_DATE_EPOCH  the time of all files (default: that of the last commit)
# MAINTAINER         whom the packages name
# ANY_VERSION=true   accepts a DOCTOR of another version, for tests of upgrades
# QUICK=true         does not compress, for tests
set -euo pipefail
umask 022
export LC_ALL=C TZ=UTC

fail() { echo "error: $*" >&2 && exit 1; }
usage() { sed -n '3,6s/^# *//p' "$0" >&2 && exit 2; }

[ $# -ge 4 ] || usage
here=$(realpath "$(dirname "$0")") programs=$(realpath "$1") processor=$2 version=$3
source=$(realpath "$here/../..")
mkdir -p "$4"
out=$(realpath "$4")
shift 4
kinds=("$@")
[ $# -gt 0 ] || kinds=(controller node archive)
# Of the ELF header, and Debian's name.
case $processor in
x86_64) machine=X86-64 debian=amd64 ;;
aarch64) machine=AArch64 debian=arm64 ;;
*) usage ;;
esac
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+(~[a-z0-9.]+)?$ ]] || fail "$version is not a version such as 0.3.0 or 0.3.0~rc1"
for tool in dpkg-deb rpmbuild readelf objdump python3; do
  command -v "$tool" >/dev/null || fail "$tool is not installed; scripts/system.sh installs it"
done
doctor=$(realpath "${DOCTOR:-$programs/doctor}")
[ -x "$doctor" ] || fail "$doctor is missing, or may not be executed"
epoch=${SOURCE_DATE_EPOCH:-$(git -C "$source" log -1 --format=%ct)} || fail "set SOURCE_DATE_EPOCH: this is no git repository"
export SOURCE_DATE_EPOCH=$epoch
maintainer=${MAINTAINER:-Cluster Doctor maintainers <maintainers@cluster-doctor.example>}
if [ "${QUICK:-}" = true ]; then deb_compression=(-Znone) rpm_payload=w.ufdio level=1; else
  # With more threads xz cuts its input differently.
  deb_compression=(-Zxz --threads-max=1) rpm_payload=w6.xzdio level=9
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The configuration of this machine does not matter, nor does its home directory.
unset DOCTOR_CONFIG DOCTOR_STORE DOCTOR_SERVER DOCTOR_CONTEXT
mkdir "$work/home"
run_doctor() { HOME=$work/home XDG_STATE_HOME=$work/home "$doctor" "$@"; }

reported=$(run_doctor --version) || fail "$doctor does not run on this machine: DOCTOR names one that does"
if [ "$reported" != "doctor $version" ] && [ "${ANY_VERSION:-}" != true ]; then
  fail "$doctor is \`$reported\`, expected version $version"
fi

# Prints the program's dynamic libraries, a line each: name, then the versions of it that the program needs.
libraries() { # program
  objdump -p "$1" | awk '
    $1 == "NEEDED" { needed[$2] = "" }
    /required from/ { sub(":", "", $3); library = $3; next }
    library && $4 ~ /^[A-Z]/ { needed[library] = needed[library] " " $4; next }
    { library = "" }
    END { for (library in needed) print library needed[library] }' | sort
}

# Prints the newest version with a prefix such as GLIBC_, without it.
newest() { # prefix, program
  libraries "$2" | grep -o "\<$1[0-9.]*" | sed "s/^$1//" | sort -V | tail -n 1
}

# Prints the Debian packages that the program's libraries are in. NVIDIA's libraries are loaded at run time and are none of them.
deb_requires() { # program
  local library rest gcc
  while read -r library rest; do
    case $library in
    libc.so.* | libm.so.* | libdl.so.* | librt.so.* | libpthread.so.* | libutil.so.* | ld-linux-*) ;;
    libgcc_s.so.1) gcc=", libgcc-s1 (>= $(newest GCC_ "$1"))" ;;
    *) fail "it is not known which Debian package has $library, which $1 needs" ;;
    esac
  done < <(libraries "$1")
  echo "libc6 (>= $(newest GLIBC_ "$1"))${gcc:-}"
}

# Prints what the program needs in the form in which an rpm distribution's libraries provide it.
rpm_requires() { # program
  local library versions one list=()
  while read -r library versions; do
    list+=("$library()(64bit)")
    for one in $versions; do list+=("$library($one)(64bit)"); done
  done < <(libraries "$1")
  local IFS=,
  echo "${list[*]}"
}

check_program() { # program
  [ -x "$1" ] || fail "$1 is missing, or may not be executed"
  readelf -h "$1" | grep -q "Machine: .*$machine" || fail "$1 is not a program for $processor"
  [ -n "$(newest GLIBC_ "$1")" ] || fail "$1 names no version of glibc that it needs"
}

# Replaces one line of a file, which has to be there once.
replace_line() { # old, new, file
  [ "$(grep -cxF "$1" "$3")" = 1 ] || fail "$3: expected the line \`$1\` once"
  sed -i "s|^$1\$|$2|" "$3"
}

compress() { # source, target
  mkdir -p "$(dirname "$2")"
  gzip -nc "-$level" "$1" >"$2"
}

# What every package has: the program, its manual pages and completions, and the licences of third-party code.
lay_out_program() { # layout, package, program, arguments of Cargo
  local layout=$1 package=$2 program=$3 page completions=$1/usr/share
  shift 3
  check_program "$programs/$program"
  install -D -m 755 -t "$layout/usr/bin" "$programs/$program"
  run_doctor man "$work/man-$program" --of "$program" >/dev/null
  for page in "$work/man-$program"/*.1; do compress "$page" "$layout/usr/share/man/man1/${page##*/}.gz"; done
  mkdir -p "$completions"/{bash-completion/completions,fish/vendor_completions.d,zsh/site-functions}
  run_doctor completions bash --of "$program" >"$completions/bash-completion/completions/$program"
  run_doctor completions fish --of "$program" >"$completions/fish/vendor_completions.d/$program.fish"
  run_doctor completions zsh --of "$program" >"$completions/zsh/site-functions/_$program"
  "$here/third-party.py" "$program" "$@" >"$work/third-party"
  compress "$work/third-party" "$layout/usr/share/doc/$package/THIRD-PARTY.gz"
  compress "$source/CHANGELOG.md" "$layout/usr/share/doc/$package/CHANGELOG.md.gz"
  mkdir -p "$layout/etc/cluster-doctor"
}

lay_out_controller() { # layout
  local layout=$1 file units=$1/usr/lib/systemd/system
  lay_out_program "$layout" cluster-doctor doctor --features doctor/kubernetes
  install -D -m 644 -t "$units" "$source"/deploy/systemd/doctor.service "$source"/deploy/systemd/doctor-run.{service,timer}
  # The group may read the configuration, also where a site names another user.
  for file in doctor.service doctor-run.service; do
    replace_line User=root 'User=cluster-doctor\nSupplementaryGroups=cluster-doctor' "$units/$file"
  done
  install -D -m 644 "$here/controller/sysusers.conf" "$layout/usr/lib/sysusers.d/cluster-doctor.conf"
  install -D -m 644 -t "$layout/usr/share/cluster-doctor/prometheus" "$source/deploy/prometheus/rules.yml"
  install -D -m 644 -t "$layout/usr/share/cluster-doctor/grafana" "$source/deploy/grafana/dashboard.json"
  # Every setting is there as a comment: a default that a new version changes applies to a site that has edited another line.
  run_doctor config init "$work/config" >/dev/null
  for file in doctor policy; do
    sed -E 's/^([a-z_]+ = )/# \1/; s/^# policy = "policy.toml"$/policy = "policy.toml"/
      s/(; |\. )?keep only what you change\./; remove the # of what you change./' \
      "$work/config/$file.toml" >"$layout/etc/cluster-doctor/$file.toml"
  done
  if grep -E '^[a-z_]' "$layout"/etc/cluster-doctor/*.toml | grep -v ':policy = "policy.toml"$' >&2; then
    fail "these settings are no comments in the packaged configuration"
  fi
}

lay_out_node() { # layout
  local layout=$1
  lay_out_program "$layout" cluster-doctor-node doctor-node
  install -D -m 644 -t "$layout/usr/lib/systemd/system" "$source/deploy/systemd/doctor-node-agent.service"
  [ -e "$work/config" ] || run_doctor config init "$work/config" >/dev/null
  run_doctor --config "$work/config/doctor.toml" deploy slurm --what scripts --out "$work/slurm" >/dev/null
  install -D -m 755 -t "$layout/usr/lib/cluster-doctor/slurm" "$work"/slurm/nodes/usr/lib/cluster-doctor/slurm/{health,prolog,epilog}
}

# Inserts the files of which more than one script has a copy.
fill_in() { # file
  sed -e "/^@state-directory@\$/{r $here/state-directory" -e 'd}' \
    -e "/^@sysusers@\$/{r $here/controller/sysusers.conf" -e 'd}' "$1"
}

set_times() { # directory
  find "$1" -exec touch --no-dereference --date="@$epoch" {} +
}

copyright() {
  cat <<TEXT
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: Cluster Doctor
Comment: THIRD-PARTY.gz in this directory has the licences of the third-party code in the program.

Files: *
Copyright: $(date -d "@$epoch" +%Y) the maintainers of Cluster Doctor
License: Apache-2.0
 On Debian systems, the complete text of the Apache License, version 2.0, is in /usr/share/common-licenses/Apache-2.0.
TEXT
}

debian_changelog() { # package
  cat <<TEXT
$1 ($version) unstable; urgency=medium

  * CHANGELOG.md.gz in this directory has the changes.

 -- $maintainer  $(date -R -d "@$epoch")
TEXT
}

# Prints the relations and descriptions of a package for Debian.
debian_fields() { # kind, what the program depends on
  case $1 in
  controller)
    cat <<TEXT
Depends: $2, systemd | systemd-standalone-sysusers | systemd-sysusers
Recommends: cluster-doctor-node, openssh-client, ca-certificates
Suggests: slurm-client, postgresql
Description: find the bad nodes of a GPU cluster, and take them out of service
 Cluster Doctor tests the nodes of a GPU cluster while they are free, keeps
 the evidence, and takes bad nodes out of service and back. It works with
 Kubernetes, Slurm, hosts over SSH, and dstack.
 .
 This package has the program doctor: the controller, its dashboard, and the
 command line for operators. The service starts when you enable it.
TEXT
    ;;
  node)
    cat <<TEXT
Depends: $2
Recommends: fio
Suggests: nvme-cli, perftest, libfabric-bin
Description: checks and tests of a GPU node, and the agent that reports them
 Cluster Doctor tests the nodes of a GPU cluster while they are free, keeps
 the evidence, and takes bad nodes out of service and back.
 .
 This package has the program doctor-node: the checks and tests of a node,
 the agent that reports them to the controller, and the hooks of Slurm.
 NVIDIA's libraries are loaded at run time where the driver is installed.
 The agent starts when you enable it.
TEXT
    ;;
  esac
}

make_deb() { # kind, package, layout, program
  local kind=$1 package=$2 root=$work/deb-$1 doc script size requires
  requires=$(deb_requires "$programs/$4")
  cp -a "$3" "$root"
  doc=$root/usr/share/doc/$package
  copyright >"$doc/copyright"
  debian_changelog "$package" >"$work/changelog"
  compress "$work/changelog" "$doc/changelog.gz"
  mv "$root/usr/share/zsh/site-functions" "$root/usr/share/zsh/vendor-completions"
  # The sum of whole KiB, as dpkg-gencontrol counts it: what `du` prints depends on the file system.
  size=$(find "$root" -printf '%y %s\n' | awk '{ sum += $1 == "f" ? int(($2 + 1023) / 1024) : 1 } END { print sum }')
  mkdir "$root/DEBIAN"
  (cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
  (cd "$root" && find etc -type f -printf '/%p\n' | sort) >"$root/DEBIAN/conffiles"
  [ -s "$root/DEBIAN/conffiles" ] || rm "$root/DEBIAN/conffiles"
  for script in postinst prerm postrm; do
    fill_in "$here/$kind/$script" >"$root/DEBIAN/$script"
    chmod 755 "$root/DEBIAN/$script"
  done
  {
    printf '%s\n' "Package: $package" "Version: $version" "Architecture: $debian" "Maintainer: $maintainer" \
      "Installed-Size: $size" 'Section: admin' 'Priority: optional'
    debian_fields "$kind" "$requires"
  } >"$root/DEBIAN/control"
  set_times "$root"
  dpkg-deb --root-owner-group "${deb_compression[@]}" --build "$root" "$out/${package}_${version}_$debian.deb" >/dev/null
}

make_rpm() { # kind, package, layout, program
  local kind=$1 package=$2 root=$work/rpm-$1 requires
  requires=$(rpm_requires "$programs/$4")
  cp -a "$3" "$root"
  install -D -m 644 -t "$root/usr/share/licenses/$package" "$source/LICENSE"
  set_times "$root"
  fill_in "$here/$kind/package.spec" >"$work/$kind.spec"
  {
    echo "%changelog"
    echo "* $(date -d "@$epoch" '+%a %b %d %Y') $maintainer - $version-1"
    echo "- CHANGELOG.md.gz in the package's documentation has the changes."
  } >>"$work/$kind.spec"
  # Of the machine that builds, nothing may be in the package: neither its name, its time nor its macros for programs.
  rpmbuild --quiet -bb --target "$processor-linux" --define "_topdir $work/rpmbuild-$kind" --define "_rpmdir $work/rpms" \
    --define "_build_name_fmt %{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm" --define "_binary_payload $rpm_payload" \
    --define '_buildhost reproducible' --define 'use_source_date_epoch_as_buildtime 1' \
    --define 'clamp_mtime_to_source_date_epoch 1' --define 'source_date_epoch_from_changelog 0' \
    --define '__os_install_post %{nil}' --define 'debug_package %{nil}' --define '_build_id_links none' \
    --define '_docdir /usr/share/doc' --define '_defaultlicensedir /usr/share/licenses' \
    --define "package_version $version" --define "maintainer $maintainer" \
    --define "program_requires $requires" --define "layout $root" "$work/$kind.spec" >"$work/rpmbuild.log" 2>&1 ||
    { cat "$work/rpmbuild.log" >&2 && fail "rpmbuild failed"; }
  mv "$work/rpms/$package-$version-1.$processor.rpm" "$out/"
}

# Makes the archive for systems without a package manager: it is unpacked into /usr, and contains nothing that a site changes.
make_archive() {
  local name=cluster-doctor-$version-linux-$processor
  local root=$work/$name
  cp -a "$work/controller/usr" "$root"
  cp -a "$work/node/usr/." "$root/"
  install -m 644 -t "$root/share/doc/cluster-doctor" "$source/LICENSE"
  mkdir "$root/share/doc/cluster-doctor/examples"
  cp -a "$work"/controller/etc/cluster-doctor/*.toml "$root/share/doc/cluster-doctor/examples/"
  set_times "$root"
  tar --create --directory "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" "$name" |
    gzip -n "-$level" >"$out/$name.tar.gz"
}

wants() { [[ " ${kinds[*]} " == *" $1 "* ]]; }
for kind in "${kinds[@]}"; do
  case $kind in controller | node | archive) ;; *) usage ;; esac
done
if wants controller || wants archive; then lay_out_controller "$work/controller"; fi
if wants node || wants archive; then lay_out_node "$work/node"; fi
if wants controller; then
  make_deb controller cluster-doctor "$work/controller" doctor
  make_rpm controller cluster-doctor "$work/controller" doctor
fi
if wants node; then
  make_deb node cluster-doctor-node "$work/node" doctor-node
  make_rpm node cluster-doctor-node "$work/node" doctor-node
fi
if wants archive; then make_archive; fi
