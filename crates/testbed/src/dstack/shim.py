#!/usr/bin/python3
"""Stands in for dstack's shim, and as `shim.py runner PORT` for its runner, on a host of the test bed.

Written against the requests of the dstack 0.22.5 server. A job's commands run as plain processes of the host, on a terminal as with
the real runner: no Docker, no images, no GPUs. The DCGM health of the host is read from `health.json` beside this program's other
files.
"""

import base64
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

VERSION = "0.22.5"
HOME = os.environ.get("DSTACK_SHIM_HOME", "/root/.dstack")
SHIM_PORT, RUNNER_PORT = 10998, 10999
# Seconds between a job's interrupt and its kill. The real runner allows ten; a job here may have to wait for a core.
GRACE = 60
GPUS = {"gpu_vendor": "nvidia", "gpu_name": "H100", "gpu_memory": 81559, "gpu_count": 8}


def at(name):
    return os.path.join(HOME, name)


class Handler(BaseHTTPRequestHandler):
    """Replies with the value that `self.server.answer` returns, or 404 for `None`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        address = urlsplit(self.path)
        try:
            body = json.loads(body) if body else {}
        except ValueError:
            body = {}
        said = self.server.answer(self.command, address.path, parse_qs(address.query), body)
        text = json.dumps(said if said is not None else {"error": "not found"}).encode()
        self.send_response(404 if said is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = reply


def serve(port, answer):
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.answer = answer
    server.serve_forever()


class Runner:
    """One job, from its specification to its output."""

    def __init__(self):
        self.lock, self.beginning = threading.Lock(), threading.Lock()
        self.told, self.process = None, None
        self.states, self.logs, self.last = [], [], 0
        self.over = self.stopped = False

    def stamp(self):
        # Each event has a unique time, because the server requests those after a given one.
        self.last = max(self.last + 1, int(time.time() * 1000))
        return self.last

    def state(self, state, **more):
        with self.lock:
            self.states.append({"timestamp": self.stamp(), "state": state, **more})

    def answer(self, method, path, query, body):
        if path == "/api/healthcheck":
            return {"service": "dstack-runner", "version": VERSION}
        if path == "/api/submit":
            self.told = body
            return {}
        if path in ("/api/upload_code", "/api/upload_archive"):
            return {}
        if path == "/api/run":
            return self.run()
        if path == "/api/pull":
            return self.pull(int(query.get("timestamp", ["0"])[0]))
        if path == "/api/stop":
            self.stop()
            return {}
        return None

    def run(self):
        """Starts the job. Idempotent, because the server retries if it had no reply in time."""
        with self.beginning:
            if self.process is None:
                self.begin()
        return {"working_dir": "/root", "username": "root"}

    def begin(self):
        spec = self.told["job_spec"]
        with open(at("started"), "a") as started:
            started.write(self.told["run"]["run_spec"]["run_name"] + "\n")
        ours, theirs = pty.openpty()
        environment = {**os.environ, **spec["env"], "HOME": "/root"}
        self.process = subprocess.Popen(
            spec["commands"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd="/root",
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.state("running")
        threading.Thread(target=self.listen, args=[ours], daemon=True).start()

    def listen(self, output):
        while True:
            try:
                part = os.read(output, 32768)
            except OSError:
                part = b""
            if not part:
                break
            with self.lock:
                self.logs.append({"timestamp": self.stamp(), "message": base64.b64encode(part).decode()})
        code = self.process.wait()
        if self.stopped:
            self.state("terminated")
        elif code == 0:
            self.state("done", exit_status=0)
        else:
            self.state("failed", exit_status=code if code > 0 else -1)
        self.over = True

    def stop(self):
        self.stopped = True
        if self.process is None or self.process.poll() is not None:
            return
        # As the real runner: first only the main process, then the whole group.
        self.process.send_signal(signal.SIGINT)
        late = threading.Timer(GRACE, lambda: os.killpg(self.process.pid, signal.SIGKILL))
        late.daemon = True
        late.start()

    def pull(self, since):
        over = self.over or self.process is None
        with self.lock:
            return {
                "job_states": [one for one in self.states if one["timestamp"] > since],
                "job_logs": [one for one in self.logs if one["timestamp"] > since],
                "runner_logs": [],
                "last_updated": max(self.last, since),
                "no_connections_secs": 0,
                "has_more": not over,
            }


class Shim:
    """The host: its tasks, each with a runner."""

    def __init__(self):
        self.tasks, self.begun = {}, 0
        self.lock = threading.RLock()

    def answer(self, method, path, query, body):
        if path == "/api/healthcheck":
            return {"service": "dstack-shim", "version": VERSION}
        if path == "/api/instance/health":
            return {"dcgm": self.health()}
        if path == "/api/instance/info":
            return {"gpu_vendor": "nvidia", "gpu_driver_version": "570.133.20"}
        if path == "/api/components":
            return {"components": []}
        if path == "/api/tasks":
            with self.lock:
                return self.begin(body) if method == "POST" else {"tasks": [self.brief(id) for id in self.tasks]}
        _, _, _, id, *verb = path.split("/")
        with self.lock:
            if id not in self.tasks:
                return None
            if verb == ["terminate"]:
                self.end(id)
            elif verb == ["remove"]:
                self.end(id)
                del self.tasks[id]
            else:
                return self.brief(id)
        return {}

    def health(self):
        try:
            with open(at("health.json")) as file:
                return json.load(file)
        except FileNotFoundError:
            return {"overall_health": 0, "incidents": []}

    def begin(self, body):
        # The server retries if it had no reply in time.
        if body["id"] in self.tasks:
            return {}
        # A job with the whole host uses the host's network; jobs on parts of a host differ by port.
        port = RUNNER_PORT
        if body["network_mode"] != "host":
            self.begun += 1
            port = 20000 + self.begun
        runner = subprocess.Popen([sys.executable, __file__, "runner", str(port)], start_new_session=True)
        with open(at("runner.pid"), "w") as file:
            file.write(str(runner.pid))
        ports = [] if port == RUNNER_PORT else [{"container": RUNNER_PORT, "host": port}]
        self.tasks[body["id"]] = {"status": "running", "runner": runner, "ports": ports}
        return {}

    def brief(self, id):
        task = self.tasks[id]
        return {"id": id, "status": task["status"], "ports": task["ports"], "termination_reason": "", "termination_message": ""}

    def end(self, id):
        task = self.tasks[id]
        task["status"] = "terminated"
        # Killing the runner closes its terminal, which ends the job.
        task["runner"].kill()
        task["runner"].wait()


def main():
    if sys.argv[1:2] == ["runner"]:
        serve(int(sys.argv[2]), Runner().answer)
    told = {"cpus": 96, "memory": 1945600 << 20, "disk_size": 204800 << 20, "addresses": ["127.0.0.1/8"], **GPUS}
    with open(at("host_info.json"), "w") as file:
        json.dump(told, file)
    serve(SHIM_PORT, Shim().answer)


main()
