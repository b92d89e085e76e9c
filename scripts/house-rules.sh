#!/usr/bin/env bash
# Rules of this repository that neither the compiler nor clippy enforces: which crate may depend on which, what the pure crates
# may never depend on, and the form of every source file. Each rule prints the violations.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

cargo=${CARGO:-cargo}
broken=0
rule() { # text, places
  if [ -n "$2" ]; then
    printf '%s:\n' "$1"
    head -n 20 <<<"$2" | sed 's/^/    /'
    broken=1
  fi
}

# The dependencies allowed by ARCHITECTURE.md. A crate that is not listed fails the check.
declare -A may_see=(
  [doctor-core]=""
  [doctor-checks]="doctor-core"
  [doctor-gpu]="doctor-core doctor-checks"
  [doctor-host]="doctor-core doctor-checks"
  [doctor-node]="doctor-core doctor-checks doctor-gpu doctor-host"
  [doctor-fake-nvidia]=""
  [doctor-store]="doctor-core doctor-checks doctor-host"
  [doctor-backend]="doctor-core doctor-checks doctor-host"
  [doctor-backend-kubernetes]="doctor-core doctor-checks doctor-host doctor-backend"
  [doctor-backend-slurm]="doctor-core doctor-checks doctor-host doctor-backend"
  [doctor-backend-ssh]="doctor-core doctor-checks doctor-host doctor-backend"
  [doctor-backend-dstack]="doctor-core doctor-checks doctor-host doctor-backend doctor-backend-ssh"
  [doctor-engine]="doctor-core doctor-checks doctor-host doctor-store doctor-backend"
  [doctor-api]="doctor-core doctor-checks doctor-store doctor-backend doctor-engine"
  [doctor-notify]="doctor-core doctor-store doctor-backend doctor-engine"
  [doctor-fleet]="doctor-core doctor-checks doctor-backend"
  [doctor-sim]="doctor-core doctor-checks doctor-store doctor-backend doctor-engine"
  [doctor]="doctor-core doctor-checks doctor-store doctor-backend doctor-backend-kubernetes doctor-backend-slurm doctor-backend-ssh doctor-backend-dstack doctor-engine doctor-api doctor-notify doctor-fleet doctor-sim"
  [doctor-bench]="doctor-core doctor-checks doctor-gpu doctor-store doctor-backend doctor-backend-kubernetes doctor-engine doctor-sim doctor-testbed"
  [doctor-testbed]=""
)
arrows=""
for manifest in crates/*/Cargo.toml; do
  crate=$(sed -n 's/^name = "\(.*\)"/\1/p' "$manifest" | head -n 1)
  if [ -z "${may_see[$crate]+known}" ]; then
    arrows+="$crate is not in the list of scripts/house-rules.sh"$'\n'
    continue
  fi
  # Only normal dependencies: tests may depend on any crate.
  if ! tree=$("$cargo" tree --quiet --package "$crate" --edges normal --depth 1 --prefix none --format '{p}'); then
    arrows+="the dependencies of $crate could not be read"$'\n'
    continue
  fi
  for other in $(tail -n +2 <<<"$tree" | grep -o '^doctor[a-z-]*' | sort -u); do
    [[ " ${may_see[$crate]} " == *" $other "* ]] || arrows+="$crate depends on $other"$'\n'
  done
done
rule "dependency arrows" "${arrows%$'\n'}"

# The table of ARCHITECTURE.md, in thousands of lines.
rule "crates whose lines in ARCHITECTURE.md are wrong by more than a tenth, or that it does not list" \
  "$(for manifest in crates/*/Cargo.toml; do
    folder=${manifest%/Cargo.toml} crate=$(basename "${manifest%/Cargo.toml}")
    find "$folder/src" -name '*.rs' -exec cat {} + | wc -l | awk -v crate="$crate" -v said="$(
      sed -n "s/^| \`$crate\` | [a-z]* | \([0-9.]*\)k |.*/\1/p" ARCHITECTURE.md)" '
      { is = $1 / 1000; if (said == "" || said > is * 1.1 + 0.1 || said < is * 0.9 - 0.1) printf "%s: %.1fk\n", crate, is }'
  done)"

outside='^(tokio|mio|async-std|rustix|libc|nix|getrandom|rusqlite|postgres|hyper|reqwest|ureq|socket2|signal-hook|tempfile) '
for crate in doctor-core doctor-checks; do
  rule "$crate is pure, yet it can reach the outside through" \
    "$("$cargo" tree --quiet --package "$crate" --edges normal --prefix none | grep -E "$outside" | sort -u)"
done

rule "the check for module cycles is broken" "$(scripts/module-cycles.py --self-test 2>&1)"
rule "modules that use each other" "$(scripts/module-cycles.py 2>&1)"

mapfile -t sources < <(find crates fuzz/src fuzz/targets -name '*.rs' | sort)
rule "files that do not open with their purpose (//!)" \
  "$(for file in "${sources[@]}"; do head -n 3 "$file" | grep -q '^//!' || echo "$file"; done)"
rule "modules without a name of their own" \
  "$(printf '%s\n' "${sources[@]}" | grep -E '/(util|utils|common|helpers|misc|manager)(\.rs|/)')"
rule "unfinished places" \
  "$(grep -nE '\b(todo|unimplemented)!\(|\b(TODO|FIXME|XXX)\b' "${sources[@]}")"
# Nodes write to the shared directory: `doctor_host::shared_directory` alone opens what is on it. The engine has no other files.
# `File` as a type is no way to open one.
by_path='\bfs::[a-z_]+\(|\bFile::(open|create|create_new|options)\b|\b(OpenOptions|DirBuilder)\b|\bopenat2?\('
fs_imports='\b(std|rustix)::fs\b|\b(std|rustix)::\{.*\bfs\b|^[[:space:]]*fs(::|,|;| as )'
only_the_type='^[0-9]+:[[:space:]]*(use std::)?fs::File[,;]$'
path_methods='\.(is_file|is_dir|metadata|symlink_metadata|canonicalize|read_dir|read_link|try_exists|exists)\(\)'
opened_by_path() { # patterns, files
  local file patterns=$1
  shift
  for file in "$@"; do
    sed '/^#\[cfg(test)\]/,$d' "$file" | grep -nE "$patterns" | grep -vE "$only_the_type" | sed "s|^|$file:|"
  done
}
rule "the check for files that are opened by path is broken" \
  "$(for line in 'use std::fs::read_to_string;' 'use rustix::fs::openat;' '    fs::{self, File},' 'use std::{fs, io};' 'fs::read(path)' \
    'let at = openat(&folder, name, flags, mode);' 'path.metadata()'; do
    [ -n "$(opened_by_path "$by_path|$fs_imports|$path_methods" <(echo "$line"))" ] || echo "not found: $line"
  done
  opened_by_path "$by_path|$fs_imports" <(printf '    fs::File,\n    fsync(&file);\n'))"
mapfile -t engine_sources < <(find crates/engine/src -name '*.rs' ! -name tests.rs | sort)
rule "files on the shared directory that are opened by path" \
  "$(opened_by_path "$by_path|$fs_imports|$path_methods" "${engine_sources[@]}"
  opened_by_path "$by_path|$fs_imports" crates/backend-slurm/src/{submit,report_job,remaining_output,share_files}.rs \
    crates/notify/src/report/schedule.rs crates/host/src/{output_file,vendor_reports}.rs)"
rule "processes that are started without a limit; use doctor_backend::process (or doctor_host::jobs for a job)" \
  "$(for file in crates/{api,backend,backend-*,doctor,engine,fleet,notify,sim,store}/src; do find "$file" -name '*.rs'; done | while read -r file; do
    [[ "$file" != */tests.rs && "$file" != crates/backend/src/process/running.rs ]] || continue
    sed '/^#\[cfg(test)\]/,$d' "$file" | grep -nE '\.(spawn|wait_with_output)\(\)|\.output\(\)[.;?]' | sed "s|^|$file:|"
  done)"
rule "tests that are ignored" "$(grep -nE '#\[ignore' "${sources[@]}")"
rule "files over 600 lines before their tests" \
  "$(for file in "${sources[@]}"; do
    [[ "$file" != */tests/* && "$file" != */tests.rs ]] || continue
    lines=$(sed '/^#\[cfg(test)\]/,$d' "$file" | wc -l)
    [ "$lines" -le 600 ] || echo "$file: $lines"
  done)"

[ "$broken" -eq 0 ] && echo "no violations"
exit "$broken"
