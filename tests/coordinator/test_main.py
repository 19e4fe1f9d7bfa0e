"""The coordinator as a process: it starts without a shuffler, says so, and leaves on SIGTERM."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from riffle.common.protocol.errors import LocalError
from riffle.common.server.service import GRACE_SECONDS
from riffle.coordinator.app import run
from tests.asking import taken_up
from tests.coordinator.world import RUN, SMALL, TOKEN, settings

PROGRAM = """
from riffle.common.process.journal import log_to_stderr
from riffle.coordinator.app import run
from riffle.coordinator.settings import Settings
log_to_stderr("coordinator")
run(Settings.load())
"""
MANUAL = {**SMALL, "learner": "manual"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answering(client: httpx.Client) -> bool:
    try:
        return client.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def started(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A coordinator's process and its operator's client."""
    known = settings(directory, port=free_port(), workers=1)
    fields = known.model_dump(exclude_none=True, mode="json")
    environment = {
        f"RIFFLE_COORDINATOR_{k.upper()}": v if isinstance(v, str) else json.dumps(v)
        for k, v in fields.items()
    }
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=os.environ | environment, stderr=log
        )
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = f"http://127.0.0.1:{known.port}"
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=40) as client:
            deadline = time.monotonic() + 60
            while not answering(client):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
            yield process, client
    finally:
        process.kill()
        process.wait()


def test_a_process_starts_and_leaves(tmp_path: Path) -> None:
    with started(tmp_path) as (process, client):
        assert client.get("/readyz").status_code == 503
        assert client.post("/v1/runs", json=MANUAL).status_code == 201
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_streams_and_long_polls_end_when_it_leaves(tmp_path: Path) -> None:
    with started(tmp_path) as (process, client):
        assert client.post("/v1/runs", json=MANUAL).status_code == 201
        answer = taken_up(client, f"/v1/runs/{RUN}/deployment", wait=30)
        with client.stream("GET", f"/v1/runs/{RUN}/events") as leaving:
            next(leaving.iter_lines())
        with client.stream("GET", f"/v1/runs/{RUN}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: run_started"
            process.send_signal(signal.SIGTERM)
            signalled_at = time.monotonic()
            assert "run_finished" not in "".join(lines), "the stream ends, the run does not"
        assert answer.result().status_code == 404  # nothing is deployed yet
        assert process.wait(60) == 0
        assert time.monotonic() - signalled_at < GRACE_SECONDS
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert not [entry for entry in log if entry["level"] == "error"], "followers are no error"


def test_tls_is_mandatory_off_loopback(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="RIFFLE_COORDINATOR_TLS_CERT_FILE"):
        run(settings(tmp_path, host="192.0.2.1"))
