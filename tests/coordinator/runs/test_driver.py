"""The loop end to end, with crashes and retries at every step, over a shuffler in memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.signatures import batch_id
from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.store.records import DeploymentRecord
from tests.coordinator.conftest import both_engines
from tests.coordinator.faults import Breaking, Failing, outcome, read
from tests.coordinator.learner import Tiny
from tests.coordinator.world import (
    RUN,
    FakeShuffler,
    drivers_end,
    parts,
    play,
    run_to_end,
    spec,
    until,
)

pytestmark = both_engines

STEPS = (
    ("shuffler", "deposit"),
    ("store", "record_deposit"),
    ("shuffler", "status"),
    ("store", "record_seal"),
    ("shuffler", "messages"),
    ("analyzer", "open"),
    ("store", "settle"),
    ("shuffler", "acknowledge"),
    ("store", "record_acknowledgement"),
)


def test_a_run_counts_two_batches_and_finishes(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["state"][0] == "finished"
    assert undisturbed["states"] == [("counted", True, batch_id(RUN, i)) for i in (0, 1)]
    assert [kind for _, kind in undisturbed["events"]] == [
        "run_started",
        "deployment_issued",
        "batch_sealed",
        "batch_counted",
        "deployment_issued",
        "batch_sealed",
        "batch_counted",
        "stage_finished",
        "run_finished",
    ]
    assert [number for number, _ in undisturbed["events"]] == list(range(1, 10))


def test_messages_are_conserved(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    shuffler = FakeShuffler()
    run_to_end(parts(tmp_path, shuffler), spec())
    for entry in undisturbed["ledger"]:
        padding = shuffler.contexts[batch_id(RUN, entry.index)].descriptor.padding
        assert entry.opened + entry.failed == entry.messages == 20 * padding.messages
        assert sum(undisturbed["histograms"][entry.index]) == entry.opened
        assert entry.spend.epsilon_upper <= 4.0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(("part", "method"), STEPS)
def test_a_crash_at_any_step_changes_nothing(
    part: str, method: str, nth: int, when: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    shuffler = FakeShuffler()
    given = parts(tmp_path, shuffler)
    breaking: Any = Breaking(getattr(given, part), method, nth, when)
    run_to_end(replace(given, **{part: breaking}), spec())
    assert read(tmp_path, lambda store: store.run(RUN).state) in ("running", "finished")
    run_to_end(parts(tmp_path, shuffler))
    assert outcome(tmp_path) == undisturbed
    assert len(shuffler.acknowledged) == 2


def test_a_shuffler_that_is_down_is_waited_for(
    tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riffle.coordinator.runs.driver.FIRST_PAUSE_SECONDS", 0.001)
    shuffler = FakeShuffler()
    shuffler.down = 5
    given, troubles = parts(tmp_path, shuffler), []

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(lambda: coordinator.drivers.trouble(RUN) is not None)
        troubles.append(coordinator.drivers.trouble(RUN))
        await drivers_end()

    play(given, act)
    assert troubles == ["the shuffler does not answer (test)"]
    assert shuffler.calls[:6] == ["deposit"] * 6
    assert outcome(tmp_path) == undisturbed


def test_a_store_that_fails_is_tried_again(
    tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riffle.coordinator.runs.driver.FIRST_PAUSE_SECONDS", 0.001)
    given = parts(tmp_path, FakeShuffler())
    full = OperationalError("COMMIT", {}, Exception("database or disk is full"))
    writes = ("next_work", "record_deposit", "record_seal", "settle", "record_acknowledgement")
    failing: Any = Failing(given.store, full, 2, *writes)
    run_to_end(replace(given, store=failing), spec())
    assert outcome(tmp_path) == undisturbed


def test_an_unexpected_error_fails_the_run_and_keeps_the_spend(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its text may hold anything, so neither the run nor the log has it."""
    shuffler = FakeShuffler()
    given = parts(tmp_path, shuffler)
    failing: Any = Failing(given.registry, ZeroDivisionError("SECRET"), 1, "build")
    run_to_end(replace(given, registry=failing))  # nothing to do yet
    breaking: Any = Breaking(given.shuffler, "messages", 1, "before")
    run_to_end(replace(parts(tmp_path, shuffler), shuffler=breaking), spec())
    run_to_end(replace(parts(tmp_path, shuffler), registry=failing))
    result = outcome(tmp_path)
    assert result["state"][:2] == ("failed", "unexpected ZeroDivisionError; see the log")
    assert result["states"] == [("counted", True, batch_id(RUN, 0))]
    assert len(result["ledger"]) == 1
    assert "step-failed" in caplog.text
    assert "SECRET" not in caplog.text


def test_a_refused_descriptor_fails_the_run(tmp_path: Path) -> None:
    shuffler = FakeShuffler()
    shuffler.refusal = RemoteError("weak-guarantee", "at most 0.5 is accepted here")
    run_to_end(parts(tmp_path, shuffler), spec())
    result = outcome(tmp_path)
    assert result["state"][:2] == ("failed", "at most 0.5 is accepted here")
    assert result["states"][0][0] == "abandoned"
    assert result["ledger"] == []


def test_a_changed_learner_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shuffler = FakeShuffler()
    given = parts(tmp_path, shuffler)
    breaking: Any = Breaking(given.shuffler, "messages", 2, "before")
    run_to_end(replace(given, shuffler=breaking), spec())
    original = Tiny.next_deployment

    def changed(self: Tiny) -> Any:
        deployment = original(self)
        return replace(deployment, n=21) if deployment and self.seen else deployment

    monkeypatch.setattr(Tiny, "next_deployment", changed)
    run_to_end(parts(tmp_path, shuffler))
    result = outcome(tmp_path)
    assert result["state"][0] == "failed"
    assert "was the learner changed" in result["state"][1]
    # Its second batch was full: it is settled, spend recorded, and nothing of the first is lost.
    assert [state for state, _, _ in result["states"]] == ["counted", "counted"]
    assert len(result["ledger"]) == 2


def test_a_refused_acknowledgement_does_not_end_the_run(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    given = parts(tmp_path, FakeShuffler())
    refused = RemoteError("unknown-batch", "no such batch")
    failing: Any = Failing(given.shuffler, refused, 1, "acknowledge")
    run_to_end(replace(given, shuffler=failing), spec())
    assert outcome(tmp_path) == undisturbed


def test_a_batch_that_the_store_lost_is_reported(tmp_path: Path) -> None:
    shuffler = FakeShuffler()
    shuffler.fills = False

    async def act(coordinator: Coordinator) -> None:
        await coordinator.create(spec())
        await until(lambda: "status" in shuffler.calls)
        shuffler.states[batch_id(RUN, 0)] = "erased"
        await until(lambda: given.store.run(RUN).state == "failed")

    given = parts(tmp_path, shuffler)
    play(given, act)
    assert "older copy of the store" in outcome(tmp_path)["state"][1]


def test_every_timing_is_recorded(tmp_path: Path) -> None:
    run_to_end(parts(tmp_path, FakeShuffler()), spec())
    rows: list[DeploymentRecord] = read(tmp_path, lambda store: store.deployments(RUN))
    kinds = {"waiting", "fetching", "opening", "planning", "storing", "acknowledging"}
    assert all(set(row.timings) == kinds for row in rows)


def test_coordinators_share_nothing(tmp_path: Path) -> None:
    run_to_end(parts(tmp_path, FakeShuffler()), spec())
    (tmp_path / "other").mkdir()
    run_to_end(parts(tmp_path / "other", FakeShuffler()), spec())
    assert outcome(tmp_path) == outcome(tmp_path / "other")
