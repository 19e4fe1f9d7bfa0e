"""Followers of a run wake when it changes, and only then."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.store.events import ChangeSignals
from tests.coordinator.world import RUN, FakeShuffler, parts, play, run_to_end, spec


def test_followers_wake_when_there_are_new_events(tmp_path: Path) -> None:
    counts: list[int] = []

    class Counting(ChangeSignals):
        def fire(self, run_id: str) -> None:
            counts.append(len(given.store.events(run_id)))
            super().fire(run_id)

    given = replace(parts(tmp_path, FakeShuffler()), signals=Counting())
    run_to_end(given, spec())
    assert counts == [2, 3, 5, 6, 9]  # after create, sealed, settle, sealed, settle


def test_a_change_wakes_followers_though_its_driver_is_stopped_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a follower would see it at its next check only, half a minute later."""
    given = parts(tmp_path, FakeShuffler())
    settle, begun, go = given.store.settle, threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        begun.set()
        assert go.wait(10)
        settle(*args)

    monkeypatch.setattr(given.store, "settle", slow)

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await asyncio.to_thread(begun.wait, 10)
        signal = given.signals.signal(RUN)
        stopping = asyncio.create_task(coordinator.drivers.halt(RUN))
        await asyncio.sleep(0.05)
        assert not signal.is_set()
        go.set()
        await stopping
        assert signal.is_set()

    play(given, act)


def test_waiters_recheck_an_unshared_store_less_often() -> None:
    shared, alone = ChangeSignals(shared=True), ChangeSignals()
    assert 5 <= shared.recheck_seconds < alone.recheck_seconds <= 30
