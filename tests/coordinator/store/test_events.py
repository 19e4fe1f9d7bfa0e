"""Who follows a run is woken by what happens in it, and by nothing else."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.store.events import Bell
from tests.coordinator.world import RUN, FakeShuffler, desk, play, run_to_end, spec


def test_who_waits_for_events_is_woken_when_there_are_new_ones(tmp_path: Path) -> None:
    told: list[int] = []

    class Heard(Bell):
        def ring(self, run_id: str) -> None:
            told.append(len(at.store.events(run_id)))
            super().ring(run_id)

    at = replace(desk(tmp_path, FakeShuffler()), bell=Heard())
    run_to_end(at, spec())
    assert told == [2, 3, 5, 6, 9]  # after create, sealed, settle, sealed, settle


def test_a_change_is_told_when_its_driver_is_stopped_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it would only find it when he looks again, half a minute later."""
    at = desk(tmp_path, FakeShuffler())
    settle, begun, go = at.store.settle, threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        begun.set()
        assert go.wait(10)
        settle(*args)

    monkeypatch.setattr(at.store, "settle", slow)

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await asyncio.to_thread(begun.wait, 10)
        ticket = at.bell.ticket(RUN)
        stopping = asyncio.create_task(coordinator._drivers.halt(RUN))
        await asyncio.sleep(0.05)
        assert not ticket.is_set()
        go.set()
        await stopping
        assert ticket.is_set()

    play(at, act)


def test_who_has_the_store_for_itself_looks_again_less_often() -> None:
    assert 5 <= Bell(shared=True).pause < Bell().pause <= 30
