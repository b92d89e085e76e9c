#!/usr/bin/env bash
# Builds the root file system of an image from the packages of the Debian or Ubuntu that this runs on. It needs neither Docker nor
# root: packages are downloaded and unpacked, and none of their scripts runs.
#   rootfs.sh controller OUT [PROGRAM]     what `doctor` needs: certificates, time zones, an unprivileged user
#   rootfs.sh node OUT [PROGRAM]           what `doctor-node` runs: fio, nvme, the programs of perftest and libfabric, chroot, a shell
#
# OUT is created. PROGRAM is copied to /usr/local/bin; without one the image is a base to add it to. EXTRA_PACKAGES names more
# packages of the configured sources, for example datacenter-gpu-manager-4-cuda12 if NVIDIA's are among them.
set -euo pipefail

usage() { sed -n '4,5s/^# *//p' "$0" >&2 && exit 2; }
kind=${1:-} out=${2:-} program=${3:-}
[ -n "$out" ] || usage
read -ra extra <<<"${EXTRA_PACKAGES:-}"
# Libraries loaded at run time are no dependencies of a package: libnss for host names comes with libc6.
case $kind in
controller) packages=(libc6 libgcc-s1 ca-certificates tzdata) ;;
node) packages=(libc6 libgcc-s1 tzdata fio nvme-cli perftest ibverbs-providers libfabric-bin libatomic1 busybox-static) ;;
*) usage ;;
esac

# Packages that configure a system, scripts of fio that are not used here, and the interpreters of those.
unneeded='adduser|base-files|debconf|dmsetup|dpkg|init-system-helpers|libpam-modules|libpam-modules-bin|libsemanage.*|media-types|passwd'
unneeded+='|perl.*|libperl.*|lib.*-perl|python3.*|libpython3.*|tar|usrmerge|uuid-runtime|openssl|pci\.ids|libgdbm.*|libdb5.*|libsqlite3.*|readline-common'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch() {
  # As for a machine with nothing installed, so that all dependencies are downloaded.
  mkdir -p "$work/archives/partial"
  : >"$work/status"
  apt-get -qq -o Dir::State::Status="$work/status" -o Dir::Cache::Archives="$work/archives" -o Debug::NoLocking=true \
    -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
    -o APT::Sandbox::User=root -o APT::Install-Recommends=false --yes --download-only install "${packages[@]}" "${extra[@]}" >&2
}

unpack() {
  local folder archive name
  # Packages write to /lib, which is /usr/lib.
  mkdir -p "$out"/{dev,etc,proc,run,sys,tmp,usr/bin,usr/sbin,usr/lib,usr/lib64,usr/local/bin,var/lib,var/tmp}
  chmod 1777 "$out/tmp" "$out/var/tmp"
  for folder in bin sbin lib lib64; do ln -s "usr/$folder" "$out/$folder"; done
  for archive in "$work"/archives/*.deb; do
    name=${archive##*/}
    if [[ ! ${name%%_*} =~ ^($unneeded)$ ]]; then
      dpkg-deb --fsys-tarfile "$archive" |
        tar --extract --directory "$out" --keep-directory-symlink --no-same-owner \
          --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*' \
          --exclude='./usr/share/lintian*' --exclude='./usr/share/bash-completion*' --exclude='*/gconv/*' --exclude='./lib/systemd/*'
      # Records the package versions in the image.
      echo "${name%.deb}" | tr _ ' ' >>"$out/usr/share/cluster-doctor-packages"
    fi
  done
}

# Does what packages leave to their scripts.
settle() {
  local library applet
  printf '%s\n' 'root:x:0:0:root:/:/usr/sbin/nologin' 'doctor:x:65532:65532:Cluster Doctor:/:/usr/sbin/nologin' >"$out/etc/passwd"
  printf '%s\n' 'root:x:0:' 'doctor:x:65532:' >"$out/etc/group"
  echo 'hosts: files dns' >"$out/etc/nsswitch.conf"
  # libfabric's library is one of several alternatives, and its package script selects it.
  library=$(find "$out/usr/lib" -name 'libpsm_infinipath.so.1.*' -type f -print -quit)
  if [ -n "$library" ]; then ln -s --relative "$library" "$out/usr/lib/$(uname -m)-linux-gnu/libpsm_infinipath.so.1"; fi
  # Repair commands run in the node's own system, and a site's checks may be scripts.
  if [ -e "$out/usr/bin/busybox" ]; then
    for applet in chroot nsenter sh; do ln -s busybox "$out/usr/bin/$applet"; done
  fi
  if [ -d "$out/usr/share/ca-certificates" ]; then
    mkdir -p "$out/etc/ssl/certs"
    find "$out/usr/share/ca-certificates" -name '*.crt' -print0 | sort -z | xargs -0 cat >"$out/etc/ssl/certs/ca-certificates.crt"
    # Without them `doctor` trusts no https server: a dstack server, a webhook, slurmrestd.
    if [ "$(grep -c 'BEGIN CERTIFICATE' "$out/etc/ssl/certs/ca-certificates.crt")" -lt 50 ]; then
      echo "the image has no certificates of authorities" >&2
      exit 1
    fi
  fi
}

# Checks that every program finds its libraries in the image, and not on this machine.
check() {
  local loader libraries file missing=""
  loader=$(find "$out/usr/lib" -name 'ld-linux-*' -type f -print -quit)
  libraries=$(find "$out/usr/lib" -name '*.so*' -printf '%h\n' | sort -u | paste -sd :)
  for file in "$out"/usr/bin/* "$out"/usr/sbin/* "$out"/usr/local/bin/*; do
    # Scripts and static programs load none.
    if [ -f "$file" ] && "$loader" --verify "$file" >/dev/null 2>&1; then
      missing+=$({ "$loader" --library-path "$libraries" --list "$file" 2>&1 || true; } |
        awk -v program="${file##*/}" -v out="$out/" '
          / => / && index($3, out) != 1 { print "\n" program ": " $1 }
          /error while loading/ { print "\n" $0 }')
    fi
  done
  if [ -n "$missing" ]; then
    echo "libraries are missing in the image:$missing" >&2
    exit 1
  fi
}

if [ -e "$out" ]; then echo "$out exists already: name a new folder" >&2 && exit 2; fi
fetch
unpack
settle
[ -z "$program" ] || install -m 755 "$program" "$out/usr/local/bin/${program##*/}"
check
