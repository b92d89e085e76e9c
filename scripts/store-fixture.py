#!/usr/bin/env python3
"""Makes the fixtures of a released store: tests migrate them to the schema of today (crates/store/tests/store_suite/released.rs).

The program of the release runs a simulated cluster with faults, users and failing calls, once with SQLite and once with PostgreSQL,
and operators' commands fill what a cluster does not. What the tests expect is computed here from the store as that program left it.

    store-fixture.py PROGRAM FOLDER     PROGRAM is `doctor` of the release; FOLDER gets the files

It needs PostgreSQL's programs and zstd. As root, the server runs as the account `postgres`.
"""

import glob
import hashlib
import json
import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NODES, SPEED, HOURS = 10, 1800, 30

POLICY = """
mode = "act"
allow = { drain = true, reset = true, reboot = true, replace = true }
limits = { jobs = 12, per_share = 6 }
repair = { drain_deadline = "4h" }
[breaker]
percent_of_pool = 80.0
nodes_per_hour = 1000
[tests.storage]
cutoff = "4h"
[tests.dl]
cutoff = "6h"
"""

WORLD = """
seed = 20
carry_documents = false
share = "data"
[assumptions]
hard_per_node_day = 2.0
gray_per_node_day = 2.0
sdc_per_node_day = 0.5
utilisation = 0.4
[disruptions]
outages_per_day = 6.0
outage = "40m"
[disruptions.submits]
refused = 0.05
unanswered = 0.05
[disruptions.changes]
refused = 0.05
unanswered = 0.05
[disruptions.jobs]
lost = 0.05
never-starts = 0.1
hung = 0.1
crashes = 0.1
no-result = 0.05
twice = 0.05
wrongly-signed = 0.03
[[pools]]
name = "left"
nodes = 5
prefix = "l"
sku = "hgx-h100"
[[pools]]
name = "right"
nodes = 5
prefix = "r"
sku = "hgx-h100"
"""

SERVICE = """
store = "%STORE%"
data = "data"
policy = "policy.toml"
cycle = "5m"
lease = "2d"
[backend.sim]
socket = "sim.sock"
[alerts.receivers.pager]
webhook = { url = "http://127.0.0.1:9/closed" }
"""


def table_digest(connection, table):
    """Returns the columns, the number of rows and a digest that does not depend on their order."""
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]

    def text(value):
        if value is None:
            return "\0"
        return value.hex() if isinstance(value, bytes) else str(value)

    rows = connection.execute(f"SELECT {', '.join(columns)} FROM {table}")
    lines = sorted("\x1f".join(text(value) for value in row).encode() for row in rows)
    digest = hashlib.sha256(b"\x1e".join(lines)).hexdigest()
    return {"columns": columns, "rows": len(lines), "digest": digest}


class Site:
    """One simulated cluster with a controller of the release, in a directory of its own."""

    def __init__(self, program, store):
        self.program = program
        self.folder = Path(tempfile.mkdtemp(prefix="doctor-fixture-"))
        (self.folder / "data").mkdir()
        (self.folder / "policy.toml").write_text(POLICY)
        self.store = store or f"{self.folder}/doctor.db"
        (self.folder / "doctor.toml").write_text(SERVICE.replace("%STORE%", self.store))
        (self.folder / "world.toml").write_text(WORLD)

    def command(self, *args):
        return [self.program, *args]

    def environment(self):
        return {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "USER": "ann", "DOCTOR_CONFIG": f"{self.folder}/doctor.toml"}

    def start(self, name, *args):
        log = open(self.folder / f"{name}.log", "ab")
        return subprocess.Popen(self.command(*args), cwd=self.folder, env=self.environment(), stdout=log, stderr=log)

    def doctor(self, *args, codes=(0,)):
        done = subprocess.run(self.command(*args), cwd=self.folder, env=self.environment(), capture_output=True, text=True)
        if done.returncode not in codes:
            sys.exit(f"doctor {' '.join(args)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def read(self, *args):
        return json.loads(self.doctor(*args, "--json", codes=(0, 1, 2, 3)))

    def play(self):
        cluster = self.start("sim", "sim", "serve", "--world", "world.toml", "--speed", str(SPEED), "--socket", "sim.sock")
        wait_for((self.folder / "sim.sock").exists)
        controller = self.start("serve", "serve")
        wait_for(lambda: self.doctor("status", codes=(0, 1, 2, 3)) != "" and self.read("nodes") != [])
        self.doctor("token", "create", "grafana", "--role", "viewer", "--yes")
        self.doctor("token", "create", "old", "--role", "operator", "--yes")
        self.doctor("token", "revoke", "old", "--why", "left", "--yes")
        self.doctor("agent", "enroll", "l[1-3]", "--controller", "http://controller:7443", "--yes", codes=(0, 2))
        names = [row["node"] for row in self.read("nodes")]
        self.doctor("agent", "enroll", *names[:3], "--controller", "http://controller:7443", "--yes")
        self.doctor("quarantine", names[4], "--why", "smells", "--yes")
        self.doctor("hold", names[5], "--why", "visitors", "--yes")
        time.sleep(HOURS * 3600 / SPEED)
        cases = self.read("cases")
        if cases:
            self.doctor("cases", "ack", cases[0].get("id") or cases[0]["case"], "--yes", codes=(0, 1))
        self.doctor("pause", "--pool", "right", "--why", "an upgrade", "--yes")
        self.import_original()
        # Killed with work in progress: runs are active, and results are stored and not entered yet.
        controller.kill()
        controller.wait()
        self.doctor("test", names[6], "--why", "no controller has seen this command yet", "--yes")
        self.doctor("db", "verify")
        cluster.kill()
        cluster.wait()

    def import_original(self):
        """History of the original cluster_doctor."""
        path = self.folder / "validation.db"
        original = sqlite3.connect(path)
        original.execute("CREATE TABLE runs (node TEXT, test TEXT, timestamp INTEGER, result TEXT)")
        original.execute("INSERT INTO runs VALUES ('l001', 'dl', 1700000000, 'pass')")
        original.commit()
        original.close()
        self.doctor("import", str(path), "--yes")

    def expected(self):
        backup = self.folder / "backup.db"
        self.doctor("db", "backup", str(backup))
        connection = sqlite3.connect(backup)
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")]
        tables = {name: table_digest(connection, name) for name in sorted(names)}
        empty = [name for name, table in tables.items() if table["rows"] == 0]
        print(f"{self.store}: {sum(table['rows'] for table in tables.values())} rows; empty tables: {', '.join(empty) or 'none'}")
        return tables


def wait_for(condition):
    began = time.time()
    while not condition():
        if time.time() - began > 120:
            sys.exit("nothing happened within two minutes")
        time.sleep(0.2)


class Postgres:
    """A server on loopback for the time of this program."""

    def __init__(self):
        self.programs = Path(sorted(glob.glob("/usr/lib/postgresql/*/bin"))[-1])
        self.folder = Path(tempfile.mkdtemp(prefix="doctor-postgres-"))
        account = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
        if account:
            shutil.chown(self.folder, account.pw_uid, account.pw_gid)
        self.who = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
        self.quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/", **self.who}
        options = ["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C"]
        subprocess.run([self.programs / "initdb", *options, "-D", self.folder / "data"], check=True, **self.quiet)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        listen = ["-h", "127.0.0.1", "-p", str(self.port), "-k", self.folder]
        self.server = subprocess.Popen([self.programs / "postgres", "-D", self.folder / "data", *listen], **self.quiet)
        self.connection = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres"]
        create = [self.programs / "createdb", *self.connection, "fixture"]
        wait_for(lambda: subprocess.run(create, **self.quiet).returncode == 0)

    def url(self):
        return f"postgres://postgres@127.0.0.1:{self.port}/fixture"

    def dump(self):
        """Returns the database as SQL that any client can run: rows as INSERT, no commands of psql."""
        options = ["--inserts", "--rows-per-insert=500", "--no-owner", "--no-privileges", "fixture"]
        text = subprocess.run([self.programs / "pg_dump", *self.connection, *options], check=True, capture_output=True, text=True).stdout
        return "\n".join(line for line in text.splitlines() if not line.startswith("\\")) + "\n"

    def stop(self):
        self.server.terminate()
        self.server.wait()
        shutil.rmtree(self.folder)


def write(path, content, compress=True):
    data = content if isinstance(content, bytes) else content.encode()
    if compress:
        data = subprocess.run(["zstd", "-19", "-c"], input=data, check=True, capture_output=True).stdout
    path.write_bytes(data)
    print(f"{path}: {len(data)} bytes")


def main():
    program, folder = os.path.abspath(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    site = Site(program, None)
    site.play()
    expected = {"sqlite": site.expected()}
    # One file without a log, as after a clean end.
    live = sqlite3.connect(site.store)
    live.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    live.close()
    write(folder / "sqlite.db.zst", Path(site.store).read_bytes())
    shutil.rmtree(site.folder)
    server = Postgres()
    try:
        site = Site(program, server.url())
        site.play()
        expected["postgresql"] = site.expected()
        write(folder / "postgresql.sql.zst", server.dump())
        shutil.rmtree(site.folder)
    finally:
        server.stop()
    write(folder / "expected.json", json.dumps(expected, indent=1) + "\n", compress=False)


if __name__ == "__main__":
    main()
