"""A run that cannot go on says why: in its trouble, in one log line, in a metric, at every replica.

And what happens to a batch can be followed in the log by the batch's id.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from riffle.common.protocol.signatures import batch_id
from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.runs.exchange import STATUS_SECONDS
from riffle.coordinator.store.transactions import Store
from tests.coordinator.conftest import both_engines
from tests.coordinator.faults import outcome
from tests.coordinator.world import (
    NOW,
    RUN,
    Clock,
    FakeShuffler,
    LateShuffler,
    Parts,
    drivers_end,
    parts,
    play,
    run_to_end,
    spec,
    until,
)

pytestmark = both_engines


class Waiting:
    """A run whose batch does not fill, until it does."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "riffle.coordinator")
        self.folder, self.caplog = folder, caplog
        self.shuffler, self.clock = FakeShuffler(), Clock()
        self.shuffler.fills = False
        self.given: Parts = parts(folder, self.shuffler, self.clock)

    def play(self, act: Callable[[Coordinator], Awaitable[None]]) -> None:
        async def whole(coordinator: Coordinator) -> None:
            await coordinator.create(spec())
            await until(lambda: "status" in self.shuffler.calls)
            await act(coordinator)
            self.shuffler.down, self.shuffler.fills = 0, True
            await drivers_end()

        play(self.given, whole)
        assert outcome(self.folder)["state"][0] == "finished"

    async def waits_for(self, coordinator: Coordinator, reason: str) -> str:
        """The trouble, once every replica can see that it has the reason; "": none."""
        await until(
            lambda: reason in (found := trouble_of(self.given)) and bool(found) == bool(reason)
        )
        trouble = trouble_of(self.given)
        assert (coordinator.drivers.trouble(RUN) or "") == trouble
        assert self.given.store.census().waiting == bool(reason)
        return trouble

    def lines(self, event: str) -> list[dict[str, Any]]:
        return [line for line in logged(self.caplog) if line["event"] == event]


def trouble_of(given: Parts) -> str:
    return str(given.store.run(RUN).trouble)


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    records = [record for record in caplog.records if record.name == "riffle.coordinator"]
    return [json.loads(record.getMessage()) for record in records]


def test_reasons_of_nodes_that_decline_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting(tmp_path, caplog)

    async def act(coordinator: Coordinator) -> None:
        waiting.shuffler.declined = ("no-users", "too-slow")
        trouble = await waiting.waits_for(coordinator, "no users left")
        assert "batch 0" in trouble
        assert "too slow" in trouble
        waiting.shuffler.declined = ()
        await waiting.waits_for(coordinator, "")

    waiting.play(act)
    (line,) = waiting.lines("run-waits")
    assert line["run_id"] == RUN
    assert "too slow" in line["detail"]
    assert len(waiting.lines("run-goes-on")) == 1


def test_a_batch_that_does_not_grow_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nodes that are gone, revoked or waiting decline nothing; only time shows that."""
    waiting = Waiting(tmp_path, caplog)

    async def act(coordinator: Coordinator) -> None:
        asked = waiting.shuffler.calls.count("status")
        await until(lambda: waiting.shuffler.calls.count("status") > asked + 3)
        assert not coordinator.drivers.trouble(RUN)
        waiting.clock.now += 16
        await waiting.waits_for(coordinator, "check that enough nodes run")

    waiting.play(act)
    assert len(waiting.lines("run-waits")) == 1


def test_a_batch_without_a_report_is_told_after_two_long_polls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is told within 30 seconds, though a poll takes ten of them."""
    waiting = Waiting(tmp_path, caplog)
    status = waiting.shuffler.status

    async def slow(batch: str, wait: float) -> Any:
        if not waiting.shuffler.fills and waiting.clock.now < NOW + 20:
            waiting.clock.now += STATUS_SECONDS
        return await status(batch, wait)

    async def act(coordinator: Coordinator) -> None:
        await waiting.waits_for(coordinator, "has been waiting for 15 s or longer with no report")
        assert waiting.clock.now == NOW + 2 * STATUS_SECONDS

    monkeypatch.setattr(waiting.shuffler, "status", slow)
    waiting.play(act)


def test_a_batch_that_grows_is_not_trouble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting(tmp_path, caplog)
    fill, conservation = 0, waiting.shuffler.conservation

    async def growing(batch: str) -> Any:
        return (await conservation(batch)).model_copy(update={"fill_tenths": fill})

    waiting.shuffler.conservation = growing  # type: ignore[method-assign, assignment]

    async def act(coordinator: Coordinator) -> None:
        nonlocal fill
        for fill in range(1, 4):  # noqa: B007
            waiting.clock.now += 10
            asked = waiting.shuffler.calls.count("conservation")
            await until(lambda: waiting.shuffler.calls.count("conservation") > asked + 2)  # noqa: B023
            assert not coordinator.drivers.trouble(RUN)

    waiting.play(act)
    assert waiting.lines("run-waits") == []


def test_a_shuffler_that_does_not_answer_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting(tmp_path, caplog)

    async def act(coordinator: Coordinator) -> None:
        waiting.shuffler.down = 4
        await waiting.waits_for(coordinator, "does not answer")
        await waiting.waits_for(coordinator, "")

    waiting.play(act)
    assert len(waiting.lines("run-waits")) == len(waiting.lines("run-goes-on")) == 1


def test_trouble_that_another_replica_left_is_cleared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting(tmp_path, caplog)

    async def act(coordinator: Coordinator) -> None:
        waiting.shuffler.declined = ("too-slow",)
        await waiting.waits_for(coordinator, "too slow")
        lease = await coordinator.drivers.halt(RUN)
        assert lease is not None
        assert waiting.given.store.run(RUN).trouble
        waiting.shuffler.declined = ()
        coordinator.drivers.drive(lease)
        await waiting.waits_for(coordinator, "")

    waiting.play(act)


# -- one batch in the log -------------------------------------------------------------------------


def test_a_batch_can_be_followed_by_its_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "riffle.coordinator")
    shuffler = FakeShuffler()
    shuffler.broken = {1: 2}
    run_to_end(parts(tmp_path, shuffler), spec())
    lines = logged(caplog)
    first = [line["event"] for line in lines if line.get("batch_id") == batch_id(RUN, 0)]
    assert first == ["deposited", "sealed", "counted"]
    counted = [line for line in lines if line["event"] == "counted"]
    assert [line["failed"] for line in counted] == [0, 2]
    assert all(line["messages"] > 0 for line in counted)
    events = [line["event"] for line in lines if "batch_id" not in line]
    assert events == ["started", "run-created", "run-finished"]


def test_lost_batches_and_the_runs_failure_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "riffle.coordinator")
    clock = Clock()
    run_to_end(parts(tmp_path, LateShuffler(clock), clock), spec(reissues=1))
    lines = logged(caplog)
    lost = [line for line in lines if line["event"] == "abandoned"]
    assert [line["batch_id"] for line in lost] == [batch_id(RUN, 0), batch_id(RUN, 1)]
    (failed,) = [line for line in lines if line["event"] == "run-failed"]
    assert "this was try 2 of 2" in failed["detail"]


def test_a_takeover_and_a_stop_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    waiting = Waiting(tmp_path, caplog)

    async def create(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(lambda: "status" in waiting.shuffler.calls)

    async def stop(coordinator: Coordinator) -> None:
        await coordinator.stop(RUN)
        await drivers_end()

    play(waiting.given, create)
    play(parts(tmp_path, waiting.shuffler, waiting.clock), stop)
    assert [line["runs"] for line in waiting.lines("started")] == [0, 1]
    assert [line["run_id"] for line in waiting.lines("run-taken-over")] == [RUN]
    assert [line["run_id"] for line in waiting.lines("run-stopped")] == [RUN]


def test_rejected_batches_are_issued_again_and_then_the_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "riffle.coordinator")
    shuffler = FakeShuffler()
    shuffler.broken = dict.fromkeys(range(3), 120)
    run_to_end(parts(tmp_path, shuffler), spec(reissues=2))
    state, message = outcome(tmp_path)["state"][:2]
    assert state == "failed"
    assert "was rejected" in message
    assert "this was try 3 of 3" in message
    assert "the shuffler's operator can see" in message
    assert [line["event"] for line in logged(caplog)].count("rejected") == 3


# -- batches that a restored store does not know ---------------------------------------------------


def test_open_batches_of_a_newer_store_are_abandoned_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their users would spend their one report on counts that nobody takes."""
    waiting = Waiting(tmp_path, caplog)
    orphan = "ab" * 16

    async def create(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(lambda: "status" in waiting.shuffler.calls)

    async def wait(_: Coordinator) -> None:
        await until(lambda: waiting.shuffler.states[orphan] == "abandoned")
        await asyncio.sleep(0.05)

    play(waiting.given, create)
    waiting.shuffler.states[orphan] = "open"
    waiting.shuffler.contexts[orphan] = waiting.shuffler.contexts[batch_id(RUN, 0)]
    play(parts(tmp_path, waiting.shuffler, waiting.clock), wait)
    assert waiting.shuffler.states[batch_id(RUN, 0)] == "open"
    assert [line["batch_id"] for line in waiting.lines("unknown-batch-abandoned")] == [orphan]


def test_an_unknown_batch_that_becomes_full_leaves_no_other_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(tmp_path, caplog)
    full, orphan = "ab" * 16, "cd" * 16
    states, abandon = waiting.shuffler.states, waiting.shuffler.abandon
    states |= {full: "open", orphan: "open"}

    async def after_its_last_report(batch_id: str) -> None:
        if batch_id == full:
            states[full] = "sealed"
        await abandon(batch_id)

    async def act(_: Coordinator) -> None:
        await until(lambda: states[orphan] == "abandoned")
        assert states[full] == "sealed"

    monkeypatch.setattr(waiting.shuffler, "abandon", after_its_last_report)
    play(waiting.given, act)


def test_unknown_batches_are_looked_for_until_the_shuffler_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riffle.coordinator.runs.coordinator.RETRY_SECONDS", 0.01)
    waiting = Waiting(tmp_path, caplog)
    waiting.shuffler.states["ab" * 16] = "open"
    waiting.shuffler.down = 1

    async def act(_: Coordinator) -> None:
        await asyncio.sleep(0.1)
        assert waiting.shuffler.states["ab" * 16] == "open"
        waiting.shuffler.down = 0
        await until(lambda: waiting.shuffler.states["ab" * 16] == "abandoned")

    play(waiting.given, act)


def test_a_batch_that_is_deposited_while_unknown_ones_are_looked_for_stays_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another replica, right after this one has read the store."""
    waiting, ids, fresh = Waiting(tmp_path, caplog), Store.batch_ids, "ab" * 16

    def deposited_afterwards(store: Store) -> set[str]:
        found = ids(store)
        waiting.shuffler.states[fresh] = "open"
        return found

    async def wait(_: Coordinator) -> None:
        await until(lambda: fresh in waiting.shuffler.states)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(Store, "batch_ids", deposited_afterwards)
    play(waiting.given, wait)
    assert waiting.shuffler.states[fresh] == "open"
