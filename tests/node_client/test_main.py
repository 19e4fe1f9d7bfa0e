"""A node process starts, stops at a signal with its workers, and reports faults at the start."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from riffle.common.protocol.errors import LocalError
from riffle.node_client.main import run
from tests.node_client.test_settings import load, variables

PROGRAM = """
import sys
from riffle.node_client.main import run
from riffle.node_client.settings import Settings
if __name__ == "__main__":
    totals = run(Settings.load(), on_start=lambda: print("started", flush=True))
    print(totals.episodes, flush=True)
"""
EMPTY = b'{"batches": [], "lease_seconds": 120}'


def start(folder: Path, url: str) -> subprocess.Popen[str]:
    program = folder / "node.py"
    program.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, str(program)],
        env=os.environ | variables(folder, SHUFFLER_URL=url, WORKERS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("answers", [False, True])
def test_a_node_has_started_once_its_shuffler_answers_and_a_signal_ends_it(
    number: signal.Signals, answers: bool, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as shuffler:
        process = start(tmp_path, f"http://127.0.0.1:{shuffler.getsockname()[1]}")
        connection, _ = shuffler.accept()
        with connection:
            if answers:
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(EMPTY) + EMPTY)
                assert process.stdout is not None
                assert process.stdout.readline() == "started\n"
            process.send_signal(number)
            output, errors = process.communicate(timeout=20)
    assert (process.returncode, output, errors) == (0, "0\n", "")


def test_without_users_a_node_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = tmp_path / "users.json"
    users.write_text("{}")
    (tmp_path / "key").write_text("5e" * 32)
    files = {"USERS_FILE": str(users), "USERS_KEY_FILE": str(tmp_path / "key")}
    settings = load(tmp_path, monkeypatch, SIMULATED_USERS="false", **files)
    with pytest.raises(LocalError, match="no users of node"):
        run(settings)


def test_a_node_that_cannot_start_reports_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(tmp_path, monkeypatch, ENVIRONMENT="River-v0")
    with pytest.raises(LocalError, match="did you mean 'RiverSwim-v0'"):
        run(settings)
    settings = load(tmp_path, monkeypatch, ENVIRONMENT="RiverSwim-v0")
    settings.credentials_file.unlink()
    with pytest.raises(LocalError, match="no node is enrolled yet: say 'riffle network enrol'"):
        run(settings)
