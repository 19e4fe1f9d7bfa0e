"""A PostgreSQL server for the tests: made in a temporary folder, reached over a socket in it.

By default it never syncs to the disk: the tests kill processes, not machines. Where PostgreSQL's
programs are missing its tests are skipped, unless RIFFLE_REQUIRE_POSTGRES is set (CI sets it): then
they fail.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import Connection, Engine, create_engine

from riffle.coordinator.store.schema import open_store as open_coordinator
from riffle.shuffler.store.schema import open_store as open_shuffler

DEBIAN = "/usr/lib/postgresql"
REQUIRED = "RIFFLE_REQUIRE_POSTGRES"
START_SECONDS = 120
DURABLE = ("listen_addresses=", "max_connections=60")
OPTIONS = ("fsync=off", "full_page_writes=off", *DURABLE)
BLOCKED = "SELECT count(*) FROM pg_locks WHERE NOT granted"
T = TypeVar("T")
TEMPLATES = {"shuffler": open_shuffler, "coordinator": open_coordinator}


def programs() -> Path:
    """The folder of initdb and postgres; skips or fails the test when there is none."""
    newest_first = sorted(Path(DEBIAN).glob("*/bin/postgres"), reverse=True)
    found = newest_first[0] if newest_first else shutil.which("postgres")
    if found is None:
        why = "PostgreSQL is not installed (Debian: postgresql)"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{why} and {REQUIRED} is set")
        pytest.skip(why)
    return Path(found).parent


class Cluster:
    """A running server. ``database`` makes databases that are dropped after use."""

    def __init__(self, folder: Path, options: tuple[str, ...]) -> None:
        self.folder = folder
        self._options = options
        self._numbers = count()
        self._bin = programs()
        self._as_user = _unprivileged(folder)
        made = self._run(
            "initdb",
            "--no-sync",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--username=riffle",
            f"--pgdata={folder / 'data'}",
        )
        made.wait(START_SECONDS)
        assert made.returncode == 0, (folder / "log").read_text()
        self.process = self._start()
        for name, open_store in TEMPLATES.items():
            self._sql(f"CREATE DATABASE {name}_template")
            open_store(self.url(f"{name}_template")).dispose()

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://riffle@/{database}?host={self.folder}"

    @contextmanager
    def database(self, store: str) -> Iterator[str]:
        """URL of a fresh database with the tables of ``store``: shuffler, coordinator; or "" """
        name, template = (
            f"test_{next(self._numbers)}",
            f"{store}_template" if store else "template0",
        )
        # A copy of the files takes half the time of a copy by the log (PostgreSQL 15 or later).
        self._sql(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        yield self.url(name)
        self._sql(f"DROP DATABASE {name} WITH (FORCE)")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGQUIT)  # to this process only; it ends its own children
        self.process.wait(START_SECONDS)

    def restart(self) -> None:
        """As after a crash of the server."""
        self.stop()
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        settings = [
            f"-c{option}" for option in (*self._options, f"unix_socket_directories={self.folder}")
        ]
        process = self._run("postgres", f"-D{self.folder / 'data'}", *settings)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._sql("SELECT 1")
            except Exception:
                assert process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            else:
                return process

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            # The server ends with the tests, however they end.
            command = ["setpriv", "--pdeathsig", "QUIT", *self._as_user, str(self._bin / program)]
            return subprocess.Popen([*command, *arguments], cwd=self.folder, stdout=log, stderr=log)

    def _sql(self, statement: str) -> None:
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql(statement)
        finally:
            engine.dispose()


def _unprivileged(folder: Path) -> list[str]:
    """How to be somebody whom PostgreSQL accepts: it refuses to run as root."""
    if os.getuid() != 0:
        return []
    shutil.chown(folder, "nobody", "nogroup")
    return ["--reuid=nobody", "--regid=nogroup", "--clear-groups"]


@contextmanager
def cluster(options: tuple[str, ...] = OPTIONS) -> Iterator[Cluster]:
    """A server in a folder of its own: pytest's folders are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="riffle-pg-") as folder:
        running = Cluster(Path(folder), options)
        try:
            yield running
        finally:
            running.stop()


def during_commit(
    engine: Engine, change: Callable[[Connection], object], act: Callable[[], T]
) -> T:
    """Returns the result of ``act``, which begins before ``change`` commits and may wait for it."""
    with engine.connect() as other, ThreadPoolExecutor(1) as thread:
        with other.begin():
            change(other)
            result = thread.submit(act)
            deadline = time.monotonic() + START_SECONDS
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watch:
                while not result.done() and not watch.exec_driver_sql(BLOCKED).scalar():
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
        return result.result(START_SECONDS)
