#!/usr/bin/env python3
"""Runs the tests of the whole workspace, several test programs at a time.

  suite.py               all test programs, and the examples in the documentation
  suite.py NAME...       only the test programs with these names (`cli`, `slurm_hooks`)

Cargo runs one test program after the other. Most of ours wait for a real Kubernetes, Slurm, dstack or database, and leave the
processors idle meanwhile. Cargo only builds them, and this program starts the next one whenever the processors have been idle for a
fifth of the last seconds and enough memory is free. There is no list of heavy tests to maintain, and a busy or small machine runs
fewer at a time. The longest start first, by the times of the previous run (kept in the target folder), else by size.

A failed test runs once more, alone. If it fails again, it has failed. If it passes, it is reported as UNSTEADY: a bug in the test or
in the program that must be investigated, and a failure all the same. What it said the first time is repeated at the end, and the share
of time that the host withheld from this machine (`steal` in /proc/stat) is printed beside it.

SUITE_JOBS=N runs at most N programs at a time.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

# More failures than this have a common cause: running them again tells nothing.
FEW = 5
# The most programs at a time on any machine. Each runs several tests in parallel.
MOST = int(os.environ.get("SUITE_JOBS") or 6)
# A program is started if the processors were idle for this share of this many seconds in which none was started.
IDLE_SHARE = 0.2
SETTLED_S = 4.0
# A real kubelet with its control plane takes one and a half GiB.
FREE_KIB = 3 << 20
# Characters of what a failed test said that are repeated at the end.
MESSAGE = 3000
# Seconds between two messages about what is still running.
SILENCE_S = 60

CARGO = os.environ.get("CARGO") or "cargo"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CORES = len(os.sched_getaffinity(0))
DOCUMENTATION = "examples in the documentation"


def ticks():
    """Returns the ticks of all processors since boot: used, idle, and withheld by the host. Time at low priority counts as idle."""
    with open("/proc/stat") as file:
        user, nice, system, idle, wait, irq, soft, steal = (int(word) for word in file.readline().split()[1:9])
    return user + system + irq + soft, nice + idle + wait, steal


def free_kib():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))


class Program:
    """One test program."""

    def __init__(self, name, words, folder, environment, is_test_of_system):
        self.name, self.words, self.folder, self.environment = name, words, folder, environment
        # Tests in `tests/` wait for other processes; unit tests compute.
        self.threads = CORES * 2 if is_test_of_system else CORES
        self.started = self.seconds = self.cpu = 0.0
        self.process = self.output = None

    def start(self):
        print(f"started: {self.name}", flush=True)
        self.output = tempfile.TemporaryFile()
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            self.words + self.arguments(), cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True)

    def arguments(self):
        # --show-output: a test that passes because it could not run reports that in its output.
        return ["--quiet", "--show-output", "--test-threads", str(self.threads)]

    def alone(self, test):
        """Runs one test with nothing beside it and prints its output. Returns whether it passed."""
        words = self.words + ["--quiet", "--show-output", "--test-threads", "1", "--exact", test]
        said = subprocess.run(words, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout.decode(errors="replace")
        print(said, flush=True)
        return bool(re.search(r"^test result: ok\. 1 passed; 0 failed", said, re.M))

    def text(self):
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


class Documentation(Program):
    """The examples in the documentation, which only Cargo can run."""

    def arguments(self):
        return ["--", "--show-output"]


def executables():
    """Builds everything and returns Cargo's messages about the test programs."""
    subprocess.run([CARGO, "build", "--workspace", "--all-features", "--quiet"], cwd=ROOT, check=True)
    told = subprocess.run(
        [CARGO, "test", "--workspace", "--all-features", "--no-run", "--quiet", "--message-format=json-render-diagnostics"],
        cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    seen = []
    for line in told.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message["profile"]["test"] and message.get("executable"):
            seen.append(message)
    return seen


def programs(wanted):
    messages = executables()
    if not messages:
        sys.exit("error: Cargo lists no test program")
    # Tests are in `deps` below the folder of the programs.
    built = os.path.dirname(os.path.dirname(messages[0]["executable"]))
    common = dict(os.environ, CARGO=CARGO, DOCTOR_BUILT=built)
    libraries = [os.path.join(built, "deps"), built, os.environ.get("LD_LIBRARY_PATH")]
    common["LD_LIBRARY_PATH"] = ":".join(part for part in libraries if part)
    found = []
    for message in messages:
        folder = os.path.dirname(message["manifest_path"])
        target = message["target"]
        of_system = "test" in target["kind"]
        package = os.path.basename(folder)
        name = target["name"] if of_system else f"{package} (unit tests of {target['name']})"
        if not wanted or target["name"] in wanted:
            found.append(Program(name, [message["executable"]], folder, dict(common, CARGO_MANIFEST_DIR=folder), of_system))
    if not wanted:
        words = [CARGO, "test", "--workspace", "--all-features", "--doc", "--quiet"]
        found.append(Documentation(DOCUMENTATION, words, ROOT, dict(os.environ), False))
    unknown = set(wanted) - {message["target"]["name"] for message in messages}
    if unknown:
        sys.exit(f"error: no test program is called {', '.join(sorted(unknown))}")
    return found, os.path.join(built, "suite-seconds.json")


def in_order(found, record):
    """Sorts programs, the longest first."""
    try:
        with open(record) as file:
            before = json.load(file)
    except (OSError, ValueError):
        before = {}
    size = lambda program: 0 if isinstance(program, Documentation) else os.path.getsize(program.words[0])
    return sorted(found, key=lambda program: (before.get(program.name, 0), size(program)), reverse=True)


def run_all(found):
    """Runs programs and yields each as it ends, with its exit status."""
    waiting, running = list(found), []
    last_word = since = time.monotonic()
    before = ticks()
    try:
        while waiting or running:
            now, (used, idle, _) = time.monotonic(), ticks()
            has_settled = now - since >= SETTLED_S
            idle_share = (idle - before[1]) / max(used - before[0] + idle - before[1], 1)
            has_room = len(running) < MOST and has_settled and idle_share >= IDLE_SHARE and free_kib() >= FREE_KIB
            if waiting and (not running or has_room):
                program = waiting.pop(0)
                program.start()
                running.append(program)
                since, before = now, ticks()
            elif has_settled:
                # Only the last seconds count.
                since, before = now, ticks()
            if now - last_word >= SILENCE_S:
                last_word = now
                print("running: " + ", ".join(f"{one.name} ({now - one.started:.0f} s)" for one in running) +
                      f"; {len(waiting)} wait", flush=True)
            for program in list(running):
                pid, status, usage = os.wait4(program.process.pid, os.WNOHANG)
                if pid:
                    program.process.returncode = os.waitstatus_to_exitcode(status)
                    program.seconds = time.monotonic() - program.started
                    program.cpu = usage.ru_utime + usage.ru_stime
                    running.remove(program)
                    yield program, program.process.returncode
            time.sleep(0.1)
    finally:
        for program in running:
            os.killpg(program.process.pid, signal.SIGKILL)


def without_names(said):
    """Leaves out libtest's lists of passed tests; what passed tests said stays."""
    return re.sub(r"^successes:\n(?:    \S+\n)+\n?", "", said, flags=re.M)


def panics(said):
    """Returns, by test, what a failed test said, without the stack."""
    parts = re.split(r"^---- (\S+) stdout ----$", said.rpartition("\nfailures:\n")[0], flags=re.M)
    short = lambda text: re.sub(r"^stack backtrace:\n(?:^ .*\n)*(?:^note: .*\n)?", "", text, flags=re.M).strip()
    return {name: short(text) for name, text in zip(parts[1::2], parts[2::2])}


def failures(said):
    """Returns the failed tests from libtest's last list."""
    last = said.rpartition("\nfailures:\n")[2]
    return re.findall(r"^    (\S+)$", last.partition("\ntest result:")[0], re.M)


def main():
    # Ending this process ends the programs, each of which is in its own session.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    wanted = sys.argv[1:]
    found, record = programs(wanted)
    began, (used_before, _, stolen_before) = time.monotonic(), ticks()
    passed, failed, broken, ended, messages = 0, [], [], [], {}
    for program, status in run_all(in_order(found, record)):
        said = program.text()
        ended.append(program)
        print(f"== {program.name}: {program.seconds:.0f} s\n{without_names(said)}", flush=True)
        passed += sum(int(count) for count in re.findall(r"^test result: \S+ (\d+) passed", said, re.M))
        names = [] if isinstance(program, Documentation) else failures(said)
        if status != 0:
            failed += [(program, name) for name in names]
            messages.update(panics(said))
            if not names:
                # The program ended without naming a test, for example by a crash.
                broken.append(f"{program.name} (ended with {status})")
        elif not re.search(r"^test result: ok", said, re.M):
            broken.append(f"{program.name} (ran no test)")

    used, _, stolen = ticks()
    missing = 100 * (stolen - stolen_before) // max(used - used_before + stolen - stolen_before, 1)
    print("\nseconds, and CPU seconds without the daemons that a test started:")
    for program in sorted(ended, key=lambda one: -one.seconds)[:12]:
        print(f"{program.seconds:7.0f} {program.cpu:7.0f}  {program.name}")
    print(f"{time.monotonic() - began:7.0f} {sum(one.cpu for one in ended):7.0f}  all {len(ended)}; "
          f"CPU time stolen by the host: {missing} %")
    if not wanted:
        with open(record, "w") as file:
            json.dump({program.name: round(program.seconds, 1) for program in ended}, file, indent=1)

    unsteady = []
    if failed and len(failed) <= FEW:
        print("\nrunning again, alone: " + ", ".join(name for _, name in failed), flush=True)
        unsteady = [name for program, name in failed if program.alone(name)]
    for what in broken:
        print(f"FAILED: {what}")
    for program, name in failed:
        print(f"\n{name}, beside others:\n{messages.get(name, '')[-MESSAGE:]}")
    for program, name in failed:
        if name in unsteady:
            print(f"UNSTEADY: {name} failed beside others and passed alone; CPU time stolen by the host: {missing} %")
        else:
            print(f"FAILED: {name} ({program.name})")
    print(f"{passed} passed, {len(failed) + len(broken)} failed")
    sys.exit(1 if failed or broken else 0)


if __name__ == "__main__":
    main()
