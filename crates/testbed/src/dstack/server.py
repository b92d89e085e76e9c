"""The dstack server with shorter intervals, on an inherited socket.

Its polling intervals and its timeouts for unresponsive hosts are constants in its code, tuned for hundreds of hosts. The test bed has
three, and a test that waited half a minute for each step would be too slow to run. Nothing else of the server is changed.
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
# Short, but long enough for a host that waits for a core: one failed check makes an instance `unreachable`, and a run
# submitted at that moment finds no capacity.
jobs_running.JOB_DISCONNECTED_RETRY_TIMEOUT = timedelta(seconds=30)
# A job that is being stopped must not be killed, and its log lost, because host or server are slow to respond.
jobs_terminating.JOB_TERMINATION_DEADLINE = timedelta(seconds=120)
client.REQUEST_TIMEOUT = 20
tunnel.SSH_TIMEOUT = 30

server = uvicorn.Server(uvicorn.Config("dstack._internal.server.main:app", log_level="error", workers=1))
server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
