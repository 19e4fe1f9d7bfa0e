"""Batches that do not fill, dishonest reports, stops: how a run goes on or ends."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.hpke import KeyPair
from riffle.common.protocol.signatures import batch_id
from riffle.coordinator.batches.analyzer import Analyzer
from riffle.coordinator.runs.coordinator import Coordinator
from tests.coordinator.conftest import both_engines
from tests.coordinator.faults import Breaking, outcome, read
from tests.coordinator.world import (
    NOW,
    RUN,
    Clock,
    FakeShuffler,
    LateShuffler,
    drivers_end,
    one_key,
    parts,
    play,
    run_to_end,
    spec,
    until,
)

pytestmark = both_engines


def test_a_descriptor_that_came_too_late_is_issued_again(tmp_path: Path) -> None:
    clock = Clock()
    run_to_end(parts(tmp_path, LateShuffler(clock), clock), spec(reissues=2))
    result = outcome(tmp_path)
    assert [state for state, _, _ in result["states"]] == ["abandoned"] * 3
    assert result["state"][0] == "failed"
    assert "try 3 of 3" in result["state"][1]


def test_clocks_that_disagree_cost_no_try(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """The shuffler's clock is ahead by more than a batch lasts, until somebody sets it right."""
    shuffler = FakeShuffler()
    shuffler.refusal = RemoteError("late", "the descriptor expired")

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec(reissues=0))
        await until(lambda: shuffler.calls.count("deposit") == 2)
        assert "clock" in (coordinator.drivers.trouble(RUN) or "")
        shuffler.refusal = None
        await drivers_end()

    play(parts(tmp_path, shuffler), act)
    result = outcome(tmp_path)
    assert {**result, "state": None} == {**undisturbed, "state": None}


def test_a_batch_that_does_not_fill_is_issued_again_and_then_fails(tmp_path: Path) -> None:
    shuffler, clock = FakeShuffler(), Clock()
    shuffler.fills = False

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec(reissues=1))
        for batch in (batch_id(RUN, 0), batch_id(RUN, 1)):
            await until(partial(is_open, shuffler, batch))
            clock.now += 63
        await drivers_end()

    play(parts(tmp_path, shuffler, clock), act)
    result = outcome(tmp_path)
    assert [state for state, _, _ in result["states"]] == ["abandoned", "abandoned"]
    assert result["state"][0] == "failed"
    assert "try 2 of 2" in result["state"][1]
    assert result["ledger"] == []
    rows = read(tmp_path, lambda store: store.deployments(RUN))
    assert [(row.index, row.step, row.episodes_executed) for row in rows] == [(0, 0, 4), (1, 0, 4)]
    assert rows[0].descriptor.mixture.same_as(rows[1].descriptor.mixture)
    assert rows[1].descriptor.expires_at == int(NOW) + 63 + 60


def test_a_reissued_batch_can_still_succeed(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    shuffler, clock = FakeShuffler(), Clock()
    shuffler.fills = False

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(partial(is_open, shuffler, batch_id(RUN, 0)))
        await shuffler.abandon(batch_id(RUN, 0))
        shuffler.fills = True
        await drivers_end()

    play(parts(tmp_path, shuffler, clock), act)
    result = outcome(tmp_path)
    assert result["state"][0] == "finished"
    assert [state for state, _, _ in result["states"]] == ["abandoned", "counted", "counted"]
    assert len(result["ledger"]) == 2


def is_open(shuffler: FakeShuffler, batch: str) -> bool:
    return shuffler.states.get(batch) == "open"


def rejected_and_used(directory: Path, broken: int, reissues: int) -> dict[str, Any]:
    shuffler = FakeShuffler()
    shuffler.broken = {0: broken}
    run_to_end(parts(directory, shuffler), spec(reissues=reissues))
    result = outcome(directory)
    assert len(shuffler.acknowledged) == len(result["ledger"])
    return result


def test_failures_within_the_promise_are_counted_away(tmp_path: Path) -> None:
    result = rejected_and_used(tmp_path, broken=2, reissues=0)
    first = result["ledger"][0]
    assert (first.failed, first.spend.within_promise, first.spend.dishonest) == (2, True, 2)
    assert first.spend.epsilon_upper <= 4.0
    assert result["state"][0] == "finished"


def test_failures_past_the_promise_weaken_the_ledger_and_are_not_used(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    L = read_messages(tmp_path / "probe")
    result = rejected_and_used(tmp_path, broken=2 * L + 1, reissues=1)
    first = result["ledger"][0]
    assert first.spend.dishonest == 3
    assert not first.spend.within_promise
    assert first.spend.epsilon_upper > undisturbed["ledger"][0].spend.epsilon_upper
    assert 0 not in result["histograms"]
    assert [state for state, _, _ in result["states"]] == ["rejected", "counted", "counted"]
    assert "batch_rejected" in [kind for _, kind in result["events"]]
    assert result["state"][0] == "finished"


def test_a_rejected_batch_without_reissues_fails_the_run(tmp_path: Path) -> None:
    L = read_messages(tmp_path / "probe")
    result = rejected_and_used(tmp_path, broken=20 * L, reissues=0)
    assert result["state"][0] == "failed"
    assert result["ledger"][0].spend.epsilon_upper == float("inf")
    assert result["histograms"] == {}


@pytest.mark.parametrize("trust", ["shuffle", "local", "central"])
@pytest.mark.parametrize("broken", [2, 5])
def test_failed_messages_are_named_once_the_batch_is_settled(
    tmp_path: Path, broken: int, trust: str
) -> None:
    """Those of a rejected batch and those within gamma; the store forgets them afterwards."""
    shuffler = FakeShuffler()
    shuffler.broken = {0: broken}
    run_to_end(parts(tmp_path, shuffler), spec(trust=trust, families="lean"))
    first, *others = (batch_id(RUN, index) for index in range(len(outcome(tmp_path)["ledger"])))
    assert shuffler.named[first] == [tuple(range(broken))]
    assert [shuffler.named[other] for other in others] == [[()]] * len(others)
    assert read(tmp_path, lambda store: {row.named for row in store.deployments(RUN)}) == {()}


def test_of_many_failed_messages_the_first_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their order is a permutation, so these are a fair sample of all that failed."""
    monkeypatch.setattr("riffle.coordinator.batches.analyzer.MAX_NAMED", 3)
    shuffler = FakeShuffler()
    shuffler.broken = {0: 5}
    run_to_end(parts(tmp_path, shuffler), spec())
    assert outcome(tmp_path)["ledger"][0].failed == 5
    assert shuffler.named[batch_id(RUN, 0)] == [(0, 1, 2)]


@pytest.mark.parametrize("trust", ["shuffle", "central"])
@pytest.mark.parametrize(("part", "method"), [("shuffler", "acknowledge"), ("store", "settle")])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_changes_no_name(
    tmp_path: Path, part: str, method: str, when: str, trust: str
) -> None:
    shuffler = FakeShuffler()
    shuffler.broken = {0: 2}
    given = parts(tmp_path, shuffler)
    breaking: Any = Breaking(getattr(given, part), method, 1, when)
    run_to_end(replace(given, **{part: breaking}), spec(trust=trust, families="lean"))
    run_to_end(parts(tmp_path, shuffler))
    assert outcome(tmp_path)["state"][0] == "finished"
    assert set(shuffler.named[batch_id(RUN, 0)]) == {(0, 1)}


def read_messages(directory: Path) -> int:
    """L of the small run's first batch."""
    directory.mkdir()
    shuffler = FakeShuffler()
    run_to_end(parts(directory, shuffler), spec())
    return shuffler.contexts[batch_id(RUN, 0)].descriptor.padding.messages


def stop_when(directory: Path, fills: bool, ready: Callable[[FakeShuffler], bool]) -> Any:
    shuffler = FakeShuffler()
    shuffler.fills = fills

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(lambda: ready(shuffler))
        await coordinator.stop(RUN)
        await coordinator.stop(RUN)
        await drivers_end()

    play(parts(directory, shuffler), act)
    return shuffler, outcome(directory)


def test_stopping_abandons_the_open_batch(tmp_path: Path) -> None:
    shuffler, result = stop_when(tmp_path, False, lambda s: "status" in s.calls)
    assert result["state"][0] == "stopped"
    assert result["states"][0][0] == "abandoned"
    assert shuffler.states[batch_id(RUN, 0)] == "abandoned"


def test_a_batch_that_the_shuffler_does_not_give_up_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shuffler, refusals = FakeShuffler(), [RemoteError("unauthorized", "another token (test)")]
    shuffler.fills, abandon = False, shuffler.abandon

    async def refuse_once(batch_id: str) -> None:
        if refusals:
            raise refusals.pop()
        await abandon(batch_id)

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(lambda: "status" in shuffler.calls)
        await coordinator.stop(RUN)
        await drivers_end()

    monkeypatch.setattr(shuffler, "abandon", refuse_once)
    play(parts(tmp_path, shuffler), act)
    assert refusals == []
    assert shuffler.states[batch_id(RUN, 0)] == "abandoned"


def test_stopping_before_the_deposit_leaves_nothing(tmp_path: Path) -> None:
    given = parts(tmp_path, FakeShuffler())
    given.shuffler.down = 10**9

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(lambda: coordinator.drivers.trouble(RUN) is not None)
        given.shuffler.down = 0
        await coordinator.stop(RUN)
        await drivers_end()

    play(given, act)
    result = outcome(tmp_path)
    assert (result["state"][0], result["states"][0][0]) == ("stopped", "abandoned")


def test_a_full_batch_of_a_stopped_run_is_still_settled(tmp_path: Path) -> None:
    shuffler = FakeShuffler()
    given = parts(tmp_path, shuffler)
    breaking: Any = Breaking(given.store, "settle", 1, "before")
    run_to_end(replace(given, store=breaking), spec())

    async def act(coordinator: Coordinator) -> None:
        await coordinator.stop(RUN)
        await drivers_end()

    given = parts(tmp_path, shuffler)
    given.store.stop(RUN, NOW)
    play(given, act)
    result = outcome(tmp_path)
    assert result["state"][0] == "stopped"
    assert result["states"] == [("counted", True, batch_id(RUN, 0))]
    assert len(result["ledger"]) == 1
    assert np.sum(result["histograms"][0]) == result["ledger"][0].opened


# -- full batches are not given up ---------------------------------------------------------------


def test_a_batch_that_fills_as_its_run_is_stopped_is_settled(tmp_path: Path) -> None:
    shuffler = FakeShuffler()
    shuffler.fills, shuffler.fills_when_abandoned = False, True

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(lambda: "status" in shuffler.calls)
        await coordinator.stop(RUN)
        await drivers_end()

    play(parts(tmp_path, shuffler), act)
    assert_stopped_and_counted(shuffler, outcome(tmp_path))


def test_a_full_batch_of_a_stopped_run_is_settled_though_its_deposit_was_not_noted(
    tmp_path: Path,
) -> None:
    shuffler = FakeShuffler()
    given = parts(tmp_path, shuffler)
    breaking: Any = Breaking(given.store, "record_deposit", 1, "before")
    run_to_end(replace(given, store=breaking), spec())
    shuffler.states[batch_id(RUN, 0)] = "sealed"
    given = parts(tmp_path, shuffler)
    given.store.stop(RUN, NOW)
    run_to_end(given)
    assert_stopped_and_counted(shuffler, outcome(tmp_path))


def assert_stopped_and_counted(shuffler: FakeShuffler, result: dict[str, Any]) -> None:
    assert result["state"][0] == "stopped"
    assert result["states"] == [("counted", True, batch_id(RUN, 0))]
    assert len(result["ledger"]) == 1
    assert shuffler.states[batch_id(RUN, 0)] == "erased"


def test_a_batch_that_fills_as_it_expires_is_counted(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    shuffler, clock = FakeShuffler(), Clock()
    shuffler.fills, shuffler.fills_when_abandoned = False, True

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(partial(is_open, shuffler, batch_id(RUN, 0)))
        clock.now += 63
        await until(lambda: "abandon" in shuffler.calls)
        shuffler.fills = True
        await drivers_end()

    play(parts(tmp_path, shuffler, clock), act)
    assert outcome(tmp_path) == undisturbed


# -- full batches that the shuffler lost ---------------------------------------------------------


def lose(shuffler: FakeShuffler, how: str) -> None:
    """The first batch is full, and then gone at the shuffler."""
    batch = batch_id(RUN, 0)
    assert shuffler.states[batch] == "sealed"
    if how == "late":
        shuffler.states[batch] = "abandoned"
    else:
        del shuffler.states[batch]


def seal_first(directory: Path, shuffler: FakeShuffler, reissues: int) -> None:
    """Run until the first batch is recorded as sealed, and no further."""
    given = parts(directory, shuffler)
    breaking: Any = Breaking(given.store, "record_seal", 1, "after")
    run_to_end(replace(given, store=breaking), spec(reissues=reissues))


@pytest.mark.parametrize("how", ["late", "unknown-batch"])
def test_a_full_batch_that_was_lost_is_issued_again(tmp_path: Path, how: str) -> None:
    shuffler = FakeShuffler()
    seal_first(tmp_path, shuffler, reissues=1)
    lose(shuffler, how)
    run_to_end(parts(tmp_path, shuffler))
    result = outcome(tmp_path)
    assert result["state"][0] == "finished"
    assert [state for state, _, _ in result["states"]] == ["abandoned", "counted", "counted"]
    assert len(result["ledger"]) == 2
    rows = read(tmp_path, lambda store: store.deployments(RUN))
    assert [(row.step, row.episodes_executed) for row in rows] == [(0, 21), (0, 21), (1, 21)]


def test_an_open_batch_that_the_shuffler_forgot_is_issued_again(tmp_path: Path) -> None:
    shuffler = FakeShuffler()
    shuffler.fills = False

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec(reissues=1))
        await until(lambda: bool(shuffler.states))
        shuffler.states.clear()
        shuffler.fills = True
        await drivers_end()

    play(parts(tmp_path, shuffler), act)
    result = outcome(tmp_path)
    assert result["state"][0] == "finished"
    assert [state for state, _, _ in result["states"]] == ["abandoned", "counted", "counted"]


def test_a_full_batch_with_another_descriptor_is_not_taken_for_the_runs_own(tmp_path: Path) -> None:
    """The store is an older copy: a newer one issued this batch, whose messages fail to open."""
    shuffler = FakeShuffler()
    seal_first(tmp_path, shuffler, reissues=0)
    older = tmp_path / "older"
    older.mkdir()
    run_to_end(parts(older, shuffler), spec(batch_seconds=61))
    result = outcome(older)
    assert result["state"][:2] == ("failed", "other bytes")
    assert [state for state, _, _ in result["states"]] == ["abandoned"]
    assert result["ledger"] == []
    assert not shuffler.named, "no node is blamed"


@pytest.mark.parametrize("how", ["late", "unknown-batch"])
def test_a_full_batch_that_was_lost_too_often_fails_the_run(tmp_path: Path, how: str) -> None:
    shuffler = FakeShuffler()
    seal_first(tmp_path, shuffler, reissues=0)
    lose(shuffler, how)
    run_to_end(parts(tmp_path, shuffler))
    result = outcome(tmp_path)
    assert result["state"][0] == "failed"
    assert "lost" in result["state"][1]
    assert [state for state, _, _ in result["states"]] == ["abandoned"]


@pytest.mark.parametrize("how", ["late", "unknown-batch"])
def test_a_lost_batch_of_a_stopped_run_is_not_asked_for_again(tmp_path: Path, how: str) -> None:
    shuffler = FakeShuffler()
    seal_first(tmp_path, shuffler, reissues=2)
    lose(shuffler, how)
    given = parts(tmp_path, shuffler)
    given.store.stop(RUN, NOW)
    run_to_end(given)
    result = outcome(tmp_path)
    assert result["state"][0] == "stopped"
    assert [state for state, _, _ in result["states"]] == ["abandoned"]
    assert shuffler.calls.count("messages") == 1


@pytest.mark.parametrize("how", ["late", "unknown-batch"])
def test_a_lost_batch_is_noticed_with_another_analyzer_key_too(tmp_path: Path, how: str) -> None:
    shuffler = FakeShuffler()
    seal_first(tmp_path, shuffler, reissues=0)
    other = Analyzer(one_key(KeyPair.from_private(bytes(32))), 1, ThreadPoolExecutor)

    async def act(coordinator: Coordinator) -> None:
        await until(lambda: coordinator.drivers.trouble(RUN) is not None)
        lose(shuffler, how)
        await drivers_end()

    play(replace(parts(tmp_path, shuffler), analyzer=other), act)
    result = outcome(tmp_path)
    assert (result["state"][0], result["states"][0][0]) == ("failed", "abandoned")
    assert "messages" not in shuffler.calls
