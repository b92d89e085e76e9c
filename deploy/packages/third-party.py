#!/usr/bin/env python3
"""Prints the licences of the third-party code in a program, each text once, with the crates that it is for.

    third-party.py CRATE [CARGO-ARGUMENT...]      CRATE is the workspace's crate of the program

The texts come from the sources of the crates, which Cargo keeps. A crate without a licence expression is an error.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PLATFORMS = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"]
TEXT = re.compile(r"^(licen[cs]e|copying|copyright|notice|unlicense)([-_.].*)?$", re.IGNORECASE)
# How deep below a crate's directory the texts of bundled C code are.
DEPTH = 3


def linked(root, metadata):
    """Returns the packages that are linked into the program: those it reaches by dependencies that are neither for tests nor for builds."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    packages = {package["id"]: package for package in metadata["packages"]}
    [start] = [id for id in metadata["workspace_members"] if packages[id]["name"] == root]
    found, waiting = set(), [start]
    while waiting:
        id = waiting.pop()
        # A procedural macro runs in the compiler.
        if id in found or any("proc-macro" in target["kind"] for target in packages[id]["targets"]):
            continue
        found.add(id)
        for dependency in nodes[id]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                waiting.append(dependency["pkg"])
    return [packages[id] for id in found if packages[id]["source"]]


def texts(package):
    folder = Path(package["manifest_path"]).parent
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if len(inside.parts) <= DEPTH and TEXT.match(path.name) and path.suffix != ".rs" and path.is_file():
            yield "\n".join(line.rstrip() for line in path.read_text(errors="replace").strip().splitlines())


def main():
    root, *arguments = sys.argv[1:]
    os.chdir(Path(__file__).resolve().parents[2])
    command = [os.environ.get("CARGO") or "cargo", "metadata", "--format-version", "1", "--locked", *arguments]
    for platform in PLATFORMS:
        command += ["--filter-platform", platform]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    packages = sorted(linked(root, metadata), key=lambda package: (package["name"], package["version"]))
    if not packages:
        sys.exit(f"error: {root} has no dependency: nothing was read")
    print("Third-party code in this program, and its licences.\n")
    print("The Rust standard library: Apache-2.0 OR MIT, copyright The Rust Project Developers")
    users = {}
    for package in packages:
        name = f"{package['name']} {package['version']}"
        if not package["license"]:
            sys.exit(f"error: {name} has no licence expression")
        print(f"{name}: {package['license']}; authors: {', '.join(package['authors']) or 'not named'}")
        for text in texts(package):
            users.setdefault(text, []).append(name)
    for text, names in sorted(users.items(), key=lambda entry: (entry[1], entry[0])):
        print(f"\n{'=' * 80}\n{', '.join(sorted(set(names)))}\n{'=' * 80}\n\n{text}")


if __name__ == "__main__":
    main()
