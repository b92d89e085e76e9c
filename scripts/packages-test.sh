#!/usr/bin/env bash
# Tests the packages: builds them from the programs of `cargo build`, and installs, upgrades and removes them on machines with
# systemd: .deb on Debian 12 and 13, .rpm with Debian's rpm. That is no rpm distribution, of which none can be downloaded here: a
# package that stands for its base has the names under which rpm itself finds the libraries of the Debian below.
#   packages-test.sh [deb-bookworm|deb-trixie|rpm]...      all machines, or only those named
#
# PROGRAMS names another directory of programs. The package of v0.2.0 from which is upgraded has the programs of this version, and the
# database that v0.2.0 wrote; its default configuration differs by a line.
#
# If this cannot run, the last line is the reason: "not run: …", exit 3, or exit 1 with CI=true.
set -euo pipefail
cd "$(dirname "$0")/.."

cannot() {
  echo "not run: packages: $*" >&2
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 3
}
fail() { echo "FAILED: $*" && exit 1; }

target=${CARGO_TARGET_DIR:-target}
programs=${PROGRAMS:-$target/debug}
wanted=("$@")
[ $# -gt 0 ] || wanted=(deb-bookworm deb-trixie rpm)
[ "$(id -u)" -eq 0 ] || cannot "machines with systemd need root"
for tool in dpkg-deb rpmbuild zstd objcopy; do
  command -v "$tool" >/dev/null || cannot "$tool is not installed; scripts/system.sh installs it"
done
for program in doctor doctor-node; do
  [ -x "$programs/$program" ] || cannot "$programs/$program does not exist: cargo build --workspace"
done
# In this order: the last line of a script that cannot run is its reason.
bookworm=$(scripts/debian-root.sh bookworm rpm) || exit
trixie=$(scripts/debian-root.sh trixie) || exit

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{programs,shared/{old,new}}
# Debug information is most of a program that is not for users.
for program in doctor doctor-node; do objcopy --strip-all "$programs/$program" "$work/programs/$program"; done

build() { # arguments of build.sh
  QUICK=true ANY_VERSION=true nice deploy/packages/build.sh "$@"
}

build_old() {
  cat >"$work/old-doctor" <<SCRIPT
#!/bin/sh
"$work/programs/doctor" "\$@" || exit
if [ "\$1 \$2" = "config init" ]; then
  for file in "\$3"/*.toml; do echo "# This line is in the default of v0.2.0 alone." >>"\$file"; done
fi
SCRIPT
  chmod +x "$work/old-doctor"
  DOCTOR=$work/old-doctor build "$work/programs" x86_64 0.2.0 "$work/shared/old" controller node
}

# The same inputs, with other times, in another place, by a user with other settings.
builds_the_same_again() {
  local file
  mkdir "$work/elsewhere"
  cp "$work"/programs/* "$work/elsewhere/"
  (umask 077 && TMPDIR=/var/tmp TZ=Asia/Tokyo build "$work/elsewhere" x86_64 0.3.0 "$work/again" node archive)
  for file in "$work"/again/*; do
    cmp "$file" "$work/shared/new/${file##*/}" || fail "two builds of ${file##*/} differ"
  done
  ls "$work/again"/*.deb "$work/again"/*.rpm "$work/again"/*.tar.gz >/dev/null
  rm -r "$work/again" "$work/elsewhere"
}

refuses() { # expected message, arguments of build.sh
  local output
  if output=$(build "${@:2}" 2>&1); then fail "build.sh ${*:2} succeeded"; fi
  [[ $output = *"$1"* ]] || fail "build.sh ${*:2}: expected \`$1\`, found: $output"
}

check_scripts() {
  local archive
  for archive in "$work"/shared/new/*.deb; do
    dpkg-deb --control "$archive" "$work/control"
    if command -v shellcheck >/dev/null; then shellcheck "$work"/control/{postinst,prerm,postrm}; fi
    rm -r "$work/control"
    [ -z "$(dpkg-deb --contents "$archive" | awk '$2 != "root/root"')" ] || fail "files in $archive that are not root's"
  done
  if rpm -qp --queryformat '[%{FILEUSERNAME} %{FILEFLAGS:fflags} %{FILENAMES}\n]' "$work"/shared/new/*.rpm | grep -v '^root '; then
    fail "files in an .rpm that are not root's"
  fi
}

# The package for the other processor, from the program that the part `portable` has built.
check_aarch64() {
  local program=$target/portable-check/aarch64-unknown-linux-gnu/debug/doctor-node root=$work/aarch64 glibc
  [ -x "$program" ] || { echo "NOT RUN: packages for aarch64: $program does not exist: scripts/portable.sh check" && return; }
  DOCTOR=$work/programs/doctor build "${program%/*}" aarch64 0.3.0 "$work/arm" node
  [ "$(dpkg-deb --field "$work"/arm/*_arm64.deb Architecture)" = arm64 ] || fail "architecture of the .deb"
  [ "$(rpm -qp --queryformat '%{ARCH} %{OS}' "$work"/arm/*.aarch64.rpm)" = "aarch64 linux" ] || fail "architecture of the .rpm"
  glibc=$(dpkg-deb --field "$work"/arm/*_arm64.deb Depends | sed -n 's/.*libc6 (>= \([0-9.]*\)).*/\1/p')
  [ "$glibc" = 2.28 ] || fail "the .deb for arm64 needs libc6 $glibc, expected 2.28"
  if ! command -v qemu-aarch64-static >/dev/null; then
    echo "NOT RUN: doctor-node of the .deb for arm64: qemu-user-static is not installed"
    return
  fi
  dpkg-deb --extract "$work"/arm/*_arm64.deb "$root"
  qemu-aarch64-static -L /usr/aarch64-linux-gnu "$root/usr/bin/doctor-node" --version
}

# A package that stands for the base of an rpm distribution: what the libraries of a root file system provide, as rpm reads them.
make_base() { # root
  local provides
  provides=$(find "$1"/usr/lib/x86_64-linux-gnu \( -name 'lib[cm].so.6' -o -name libgcc_s.so.1 -o -name 'ld-linux-*.so.2' \) |
    /usr/lib/rpm/elfdeps --provides | sort -u | sed 's/^/Provides: /')
  cat >"$work/base.spec" <<SPEC
Name: base-of-no-distribution
Version: 1
Release: 1
Summary: Stands for the base of a distribution
License: none
AutoReqProv: no
Provides: systemd
Provides: coreutils
Provides: findutils
Provides: /bin/sh
$provides
%description
It has no files.
%files
SPEC
  rpmbuild --quiet -bb --define "_topdir $work/rpmbuild" --define "_rpmdir $work/shared" --define '_build_name_fmt base.rpm' \
    "$work/base.spec"
}

echo "== packages"
build "$work/programs" x86_64 0.3.0 "$work/shared/new"
build_old
builds_the_same_again
refuses "is not a program for aarch64" "$work/programs" aarch64 0.3.0 "$work/refused" node
refuses "is not a version" "$work/programs" x86_64 v0.3 "$work/refused"
mkdir "$work/other"
cp "$work/programs/doctor" "$work/other/"
cp "$(command -v curl)" "$work/other/doctor-node"
refuses "it is not known which Debian package has" "$work/other" x86_64 0.3.0 "$work/refused" node
if ANY_VERSION="" deploy/packages/build.sh "$work/programs" x86_64 9.9.9 "$work/refused" 2>/dev/null; then
  fail "build.sh packs programs of another version"
fi
check_scripts
check_aarch64
zstd --quiet --decompress -o "$work/shared/v0.2.0.db" crates/store/tests/released/v0.2.0/sqlite.db.zst
cp scripts/packages-test/scenario.sh "$work/shared/"
(cd "$work/shared/new" && stat -c '%s %n' -- *)

on_machine() { # name, root, command
  local started=$SECONDS
  echo "== $1"
  scripts/machine.sh "$2" "$work/shared" "${@:3}" | tee "$work/output"
  [ "$(tail -n 1 "$work/output")" = ok ] || fail "$1 did not end with ok"
  echo "$1: $((SECONDS - started)) s"
}

for one in "${wanted[@]}"; do
  case $one in
  deb-bookworm) on_machine "$one" "$bookworm" bash /shared/scenario.sh deb ;;
  deb-trixie) on_machine "$one" "$trixie" bash /shared/scenario.sh deb ;;
  rpm)
    make_base "$bookworm"
    on_machine "$one" "$bookworm" bash /shared/scenario.sh rpm
    ;;
  *) fail "$one is no machine of this test" ;;
  esac
done
