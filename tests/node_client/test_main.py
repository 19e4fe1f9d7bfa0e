"""A node process starts, stops at a signal with its workers, and reports faults at the start."""

import os
import signal
import subprocess
import sys
import time
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
NOBODY = "http://127.0.0.1:9"


def start(folder: Path) -> subprocess.Popen[str]:
    program = folder / "node.py"
    program.write_text(PROGRAM)
    environment = os.environ | variables(folder, SHUFFLER_URL=NOBODY, WORKERS="1")
    process = subprocess.Popen(
        [sys.executable, str(program)],
        env=environment | {"PYTHONPATH": str(Path.cwd())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_that_cannot_reach_its_shuffler(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = start(tmp_path)
    time.sleep(0.2)
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
    with pytest.raises(LocalError, match="cannot read"):
        run(settings)
