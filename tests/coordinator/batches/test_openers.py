"""Processes that open messages: their answers, and that none is left behind."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from pathlib import Path

import numpy as np
import pytest

from riffle.coordinator.batches.analyzer import OpenerPool
from tests.common.process.test_workers import ends_with_its_parent, until_gone

ORPHANS = """
import time
from riffle.coordinator.batches.analyzer import OpenerPool
from tests.coordinator.batches.test_openers import pid
if __name__ == "__main__":
    openers = OpenerPool(1)
    print(openers.submit(pid, b"").result(), flush=True)
    time.sleep(60)
"""


def pid(_: bytes) -> int:
    return os.getpid()


def doubled(factor: int, data: bytes | memoryview, *, more: int = 0) -> tuple[int, type]:
    return factor * len(data) + more, type(data)


def refuse(data: bytes) -> None:
    raise ValueError(f"{len(data)} bytes")


def slow(data: bytes, *, seconds: float = 0.2) -> int:
    time.sleep(seconds)
    return len(data)


def held(path: bytes) -> None:
    """Runs until the file exists."""
    while not Path(path.decode()).exists():
        time.sleep(0.01)


@pytest.fixture
def openers() -> Iterator[OpenerPool]:
    pool = OpenerPool(2)
    yield pool
    pool.shutdown()


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_a_part_of_a_large_memory_arrives_as_bytes(openers: OpenerPool, size: int) -> None:
    data = np.empty(size + 10, dtype=np.uint8).data[5 : 5 + size]
    assert openers.submit(doubled, 2, data).result() == (2 * size, bytes)
    assert openers.submit(doubled, 2, data, more=1).result() == (2 * size + 1, bytes)


def test_more_work_than_processes_is_all_done(openers: OpenerPool) -> None:
    calls = [openers.submit(slow, bytes(n)) for n in range(6)]
    assert [call.result() for call in calls] == list(range(6))
    assert len({openers.submit(pid, b"").result() for _ in range(20)}) <= 2


def test_an_error_comes_back_and_ends_nothing(openers: OpenerPool) -> None:
    for _ in range(3):
        with pytest.raises(ValueError, match="7 bytes"):
            openers.submit(refuse, bytes(7)).result()
    assert openers.submit(slow, b"1").result() == 1


def test_a_call_of_a_process_that_dies_raises() -> None:
    pool = OpenerPool(1)
    process = pool.submit(pid, b"").result()
    call = pool.submit(slow, b"", seconds=30)
    os.kill(process, signal.SIGKILL)
    for each in (call, pool.submit(slow, b"")):
        with pytest.raises(BrokenExecutor, match="has died"):
            each.result(20)
    pool.shutdown()


def test_waiting_calls_are_cancelled_and_the_processes_end(tmp_path: Path) -> None:
    pool, let_go = OpenerPool(1), tmp_path / "let go"
    process = pool.submit(pid, b"").result()
    calls = [pool.submit(held, bytes(let_go)) for _ in range(20)]
    pool.shutdown(wait=False, cancel_futures=True)
    assert sum(call.cancelled() for call in calls) >= 19
    let_go.touch()
    pool.shutdown(wait=True)
    until_gone(process)


def test_processes_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    ends_with_its_parent(ORPHANS, tmp_path)
