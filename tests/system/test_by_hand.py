"""Types the guide "A network by hand" from top to bottom into one shell, as an operator would.

Ports are replaced by free ones. `sudo` is not typed, except for the database's own commands, in a
cluster of this test. RIFFLE_WALK=1 leaves out the quick flags of `riffle run`, restores the backup,
starts Prometheus where it is installed, and types the guide with PostgreSQL too.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, Queue

import pytest

from riffle.common.server.service import GRACE_SECONDS
from riffle.deploy.network.loopback import free_port
from tests.postgres import OPTIONS, cluster
from tests.test_readme import blocks

ROOT = Path(__file__).parents[2]
GUIDE = "\n## A network by hand\n"
WALK = os.environ.get("RIFFLE_WALK") == "1"
RESTORE = "$ rm --force"
PATIENCE = 900 if WALK else 120
DONE = "@@done"
QUICK = " --episodes 200 --epsilon 20 --horizon 2"
"""Flags of a run that takes seconds, which `ALLOWED` makes acceptable."""
ALLOWED = {
    "shuffler": "RIFFLE_SHUFFLER_MAX_EPSILON=20\n",
    "coordinator": "RIFFLE_COORDINATOR_WORKERS=1\n",
    "nodes": "RIFFLE_NODE_MAX_EPSILON=20\nRIFFLE_NODE_HORIZON=2\nRIFFLE_NODE_WORKERS=1\n",
}
"""What the operators and the owner add to their settings for the quick run."""


class Shell:
    """An interactive shell in an empty directory, with the guide's programs on its path."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}:{folder / 'bin'}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env=os.environ | {"PATH": path} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            process_group=0,
        )
        self._lines: Queue[str] = Queue()
        self.printed: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def types(self, line: str, until: str = DONE) -> list[str]:
        """Types a command; returns what is printed until it is over, or until a text appears."""
        assert self.process.stdin is not None
        said: list[str] = []
        self.process.stdin.write(f"{line}\n" + ("" if until != DONE else f'echo "{DONE} $?"\n'))
        deadline = time.monotonic() + PATIENCE
        while not said or until not in said[-1]:
            try:
                said.append(self._lines.get(timeout=deadline - time.monotonic()))
            except (Empty, ValueError):
                pytest.fail(f"over {PATIENCE} s: {line}\n{''.join(said)}")
        self.printed += said
        if until == DONE:
            assert said[-1].split()[-1] == "0", f"{line}\n{''.join(said)}"
        return said


@contextmanager
def shell(folder: Path, environment: dict[str, str]) -> Iterator[Shell]:
    """A shell; what it started ends with it."""
    for name in ("deploy", "examples"):
        (folder / name).symlink_to(ROOT / name)
    shim = folder / "bin" / "sudo"  # only `sudo -u postgres COMMAND` is typed
    shim.parent.mkdir()
    shim.write_text('#!/bin/sh\nshift 2; exec "$@"\n')
    shim.chmod(0o755)
    opened = Shell(folder, environment)
    opened.types("set -m")
    try:
        yield opened
    finally:
        pids = opened.types("jobs -p")[:-1]
        for pid in [int(word) for word in pids if word.strip().isdecimal()]:
            os.killpg(pid, signal.SIGKILL)
        opened.close()


def lines_of(text: str, ports: dict[str, int]) -> Iterator[str]:
    for command in text.splitlines():
        line, _, _ = command.removeprefix("$ ").partition("  #")
        if line.startswith("riffle run demo") and not WALK:
            line += QUICK
        for guides, ours in ports.items():
            line = line.replace(guides, str(ours))
        yield line


def is_typed(line: str, postgres: bool) -> bool:
    """Returns whether a line belongs to this walk, and may be typed on this machine."""
    if line.startswith("sudo") and not line.startswith("sudo -u postgres"):
        return False
    program = line.split(maxsplit=1)[0]
    if program in {"make", "source"}:
        return False
    if program in {"promtool", "prometheus"} and shutil.which(program) is None:
        return False
    if line.startswith(("prometheus", "kill $prometheus")):
        return WALK and shutil.which("prometheus") is not None
    if "postgres" in line:
        return postgres
    return not ("sqlite" in line and postgres)


def walk(folder: Path, postgres: bool, environment: dict[str, str]) -> None:
    ports = {"8401": free_port(), "8400": free_port()}
    with shell(folder, environment) as typed:
        for kind, text in blocks(ROOT / "docs" / "howto.md", GUIDE):
            if text.startswith(RESTORE) and not WALK:
                break
            if kind == "python":
                (folder / text.split()[1]).write_text(text)
                continue
            for line in lines_of(text, ports):
                if not is_typed(line, postgres):
                    continue
                started = time.monotonic()
                if line.startswith("riffle") and " & " in line:
                    typed.types(line, until='"serving"')
                else:
                    typed.types(line)
                seconds = time.monotonic() - started
                print(f"{seconds:.1f} s: {line}")
                if line.startswith("riffle network init") and not WALK:
                    for role, settings in ALLOWED.items():
                        with (folder / "network" / role / "settings").open("a") as file:
                            file.write(settings)
                if line.startswith("kill"):
                    assert seconds < GRACE_SECONDS, f"a clean end: {line}"
        assert_logs_are_clean(typed.printed)


def assert_logs_are_clean(printed: list[str]) -> None:
    """No role logs an error, at its end either (finding D10)."""
    logs = [json.loads(line) for line in printed if line.startswith('{"time"')]
    assert {entry["service"] for entry in logs} == {"shuffler", "coordinator", "node"}
    assert not [entry for entry in logs if entry["level"] == "error"]
    assert {"batch-accepted", "counted", "node-revoked"} <= {entry["event"] for entry in logs}


@pytest.mark.long
def test_the_guide_is_typed_with_sqlite(tmp_path: Path) -> None:
    walk(tmp_path, postgres=False, environment={})


@pytest.mark.long
@pytest.mark.skipif(not WALK, reason="takes as long again; RIFFLE_WALK=1")
def test_the_guide_is_typed_with_postgresql(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = str(free_port())
    monkeypatch.setenv("PGPORT", port)  # the guide's addresses name none
    listening = ("listen_addresses=localhost", f"port={port}")
    with ExitStack() as closing:
        running = closing.enter_context(cluster((*OPTIONS, *listening)))
        of_server = {"PGPORT": port, "PGUSER": "riffle", "PGDATABASE": "postgres"}
        walk(tmp_path, postgres=True, environment=of_server | {"PGHOST": str(running.folder)})
