"""The dstack server, unchanged but for its patience, on a socket that was handed down.

How often it looks at jobs and instances, and how long it waits for a host that does not answer, is written into its code and tuned for
hundreds of hosts. A bed has three, and a test that waits half a minute for each step is a test that nobody runs. Nothing else of the
server is touched: what it does when it looks is its own.
"""

import socket
import sys
from datetime import timedelta

from dstack._internal.server import bootstrap

bootstrap.set_up_process()

import uvicorn  # noqa: E402

from dstack._internal.core.services.ssh import tunnel  # noqa: E402
from dstack._internal.server.background.pipeline_tasks import base, jobs_running, jobs_terminating  # noqa: E402
from dstack._internal.server.services.runner import client  # noqa: E402

EVERY = timedelta(seconds=0.5)

begin = base.Pipeline.__init__


def begin_hurried(self, **settings):
    settings["min_processing_interval"] = min(EVERY, settings["min_processing_interval"])
    begin(self, **settings)


base.Pipeline.__init__ = begin_hurried
base.Fetcher._DEFAULT_FETCH_DELAYS = [0.2]
# Short, but not so short that a host which has to wait for a core is given up: one look that fails makes an instance `unreachable`, and
# whatever is submitted in that moment finds no place.
jobs_running.JOB_DISCONNECTED_RETRY_TIMEOUT = timedelta(seconds=30)
# And a job that was told to stop is not killed, and its log lost, because host and server were slow to hear of each other.
jobs_terminating.JOB_TERMINATION_DEADLINE = timedelta(seconds=120)
client.REQUEST_TIMEOUT = 20
tunnel.SSH_TIMEOUT = 30

server = uvicorn.Server(uvicorn.Config("dstack._internal.server.main:app", log_level="error", workers=1))
server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
