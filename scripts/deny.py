#!/usr/bin/env python3
"""Checks licences, banned crates and sources of all dependencies against deny.toml.

cargo-deny reads the same file and checks more (advisories, licence texts), but every fresh machine would have to build it first, so
the tests use this program for the three checks that deny.toml configures. A setting that this program does not know is an error: nothing in
deny.toml is silently ignored.
"""

import json
import os
import re
import subprocess
import sys
import tomllib

# The platforms that we build for.
PLATFORMS = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"]
CRATES_IO = ("registry+https://github.com/rust-lang/crates.io-index", "sparse+https://index.crates.io/")

# The settings that this program understands, and the values that it supports. None: any value.
KNOWN = {
    ("graph", "all-features"): [True],
    ("licenses", "allow"): None,
    # For cargo-deny, which compares licence texts. Here a crate without an expression fails.
    ("licenses", "confidence-threshold"): None,
    ("bans", "multiple-versions"): ["allow"],
    ("bans", "wildcards"): ["deny"],
    ("bans", "allow-wildcard-paths"): [True],
    ("bans", "deny"): None,
    ("sources", "unknown-registry"): ["deny"],
    ("sources", "unknown-git"): ["deny"],
}


def allows(expression, allowed):
    """Returns whether the allowed licences satisfy a licence expression (SPDX, or the older form with slashes)."""
    words = re.findall(r"[()]|[^\s()]+", re.sub(r"\s*/\s*", " OR ", expression))

    def either():
        kept = both()
        while words and words[0] == "OR":
            words.pop(0)
            # Both sides are parsed, even if the first decides.
            kept = both() or kept
        return kept

    def both():
        kept = one()
        while words and words[0] == "AND":
            words.pop(0)
            kept = one() and kept
        return kept

    def one():
        word = words.pop(0)
        if word == "(":
            kept = either()
            if words.pop(0) != ")":
                raise ValueError(expression)
            return kept
        if words and words[0] == "WITH":
            words.pop(0)
            word = f"{word} WITH {words.pop(0)}"
        return word in allowed

    kept = either()
    if words:
        raise ValueError(expression)
    return kept


def settings():
    with open("deny.toml", "rb") as file:
        told = tomllib.load(file)
    for section, values in told.items():
        for key, value in values.items():
            if (section, key) not in KNOWN:
                sys.exit(f"error: deny.toml: scripts/deny.py does not know `{section}.{key}`")
            accepted = KNOWN[section, key]
            if accepted is not None and value not in accepted:
                sys.exit(f"error: deny.toml: scripts/deny.py does not know `{section}.{key} = {value!r}`")
    return told


def main():
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    told = settings()
    command = [os.environ.get("CARGO") or "cargo", "metadata", "--format-version", "1", "--all-features", "--locked"]
    for platform in PLATFORMS:
        command += ["--filter-platform", platform]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    used = {node["id"] for node in metadata["resolve"]["nodes"]}
    packages = [package for package in metadata["packages"] if package["id"] in used]
    banned = {entry["crate"]: entry["reason"] for entry in told["bans"]["deny"]}
    allowed = set(told["licenses"]["allow"])

    wrong = []
    for package in packages:
        name = f"{package['name']} {package['version']}"
        try:
            if not allows(package["license"] or "", allowed):
                wrong.append(f"{name}: its licence is `{package['license']}`, which deny.toml does not allow")
        except (ValueError, IndexError):
            wrong.append(f"{name}: unknown licence expression: `{package['license']}`")
        if package["name"] in banned:
            wrong.append(f"{name} is banned: {banned[package['name']]}")
        if package["source"] is None:
            for dependency in package["dependencies"]:
                if dependency["req"] == "*" and not dependency.get("path"):
                    wrong.append(f"{name} takes any version of {dependency['name']}")
        elif not package["source"].startswith(CRATES_IO):
            wrong.append(f"{name} comes from {package['source']}")
    for line in wrong:
        print(f"error: {line}")
    others = sum(package["source"] is not None for package in packages)
    if not others:
        sys.exit("error: Cargo lists no dependency: nothing was checked")
    print(f"{others} dependencies: licences, bans and sources {'match deny.toml' if not wrong else 'violate deny.toml'}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
