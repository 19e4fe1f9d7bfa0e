"""The coordinator as a process: it starts without a shuffler, says so, and leaves on SIGTERM."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.coordinator.world import SMALL, TOKEN, settings

PROGRAM = """
from coordinator.main import run
from coordinator.settings import Settings
run(Settings.load())
"""
MANUAL = {**SMALL, "learner": "manual"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def answering(client: httpx.Client) -> bool:
    try:
        return client.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


def test_a_process_starts_and_leaves(tmp_path: Path) -> None:
    known = settings(tmp_path, port=free_port(), workers=1)
    fields = known.model_dump(exclude_none=True, mode="json")
    environment = {f"RIFFLE_COORDINATOR_{k.upper()}": str(v) for k, v in fields.items()}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{known.port}", headers=headers) as client:
            deadline = time.monotonic() + 60
            while not answering(client):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
            assert client.get("/readyz").status_code == 503
            assert client.post("/v1/runs", json=MANUAL).status_code == 201
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
