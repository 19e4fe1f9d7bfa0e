"""Worker processes end with their parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

ORPHANS = """
import time
from riffle.common.process.workers import process_pool
if __name__ == "__main__":
    pool = process_pool(1)
    pool.submit(int).result()
    print(*pool._processes, flush=True)
    time.sleep(60)
"""


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    ends_with_its_parent(ORPHANS, tmp_path)


def ends_with_its_parent(program: str, folder: Path) -> None:
    """Kill a program once it has printed the id of a process of its own; that one ends too."""
    file = folder / "parent.py"
    file.write_text(program)
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    with subprocess.Popen(
        [sys.executable, str(file)], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        assert running(process)
        parent.kill()
    until_gone(process)


def until_gone(process: int) -> None:
    """Wait for a process to end."""
    deadline = time.monotonic() + 20
    while running(process):
        assert time.monotonic() < deadline, "the process is still there"
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether a process is there and not just waiting to be reaped."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_parent_leaves_nothing_in_the_log(tmp_path: Path) -> None:
    """Python's own tracker of semaphores would warn in plain text when it cleans up."""
    file = tmp_path / "parent.py"
    file.write_text(ORPHANS)
    with subprocess.Popen(
        [sys.executable, str(file)],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        parent.kill()
        _, log = parent.communicate(timeout=30)  # until the last holder of the pipe has ended
    assert log == ""
