"""Starts a network's services by forking a process that has imported their modules once.

A new interpreter imports FastAPI, SQLAlchemy and SciPy for a second before it serves, and the tests
start about a hundred services. Here `multiprocessing` forks them from one process per test process.
After the imports, all is as in `deploy.network.loopback`: each service is a process of its own with
the same command, variables, files and signals. But its worker processes are forked from here, too:
they are not its children, are not in its process group, and do not write to its log. With the
variable SPAWN_WORKERS they are. Tests of the command line start real interpreters.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import IO, Any

from riffle.common.process import workers

SERVER = multiprocessing.get_context("forkserver")
LOADED = ("riffle.shuffler.app", "riffle.coordinator.app", "riffle.node_client.main")
SERVER.set_forkserver_preload(["riffle.deploy.cli.network", "uvloop", "httptools", *LOADED])


class Service:
    """A process with those methods of `subprocess.Popen` that networks and their tests use."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self.pid = int(process.pid or 0)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_service(
    role: str, environment: Mapping[str, str], log: IO[bytes], inherited: Sequence[int]
) -> Service:
    """Stands in for `deploy.network.loopback.start_service`."""
    from unittest.mock import patch

    with patch.dict(os.environ, environment):  # glibc reads its settings when the server starts
        forkserver.ensure_running()
    log_copy, *kept = (DupFd(file) for file in (log.fileno(), *inherited))
    process = SERVER.Process(target=_serve, args=(role, dict(environment), log_copy, kept))
    process.start()
    return Service(process)


def _serve(role: str, environment: dict[str, str], log: Any, inherited: list[Any]) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    output = log.detach()
    for number in (1, 2):
        os.dup2(output, number)
    for file in inherited:
        file.detach()  # stays open as long as the process lives
    sys.argv = ["riffle", role]
    if "SPAWN_WORKERS" not in environment:
        _fork_workers()
    from riffle.deploy.cli.main import main

    main()


def _fork_workers() -> None:
    """Has the process that forks services fork their worker processes as well."""
    from unittest.mock import patch

    # Otherwise each service would start a fork server of its own.
    patch.object(forkserver._forkserver, "ensure_running", lambda: None).start()
    patch.object(workers, "SPAWN", SERVER).start()
