"""Runs whose batches are summed: the counts of messages, one spend, and large lies rejected."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riffle.common.protocol.descriptor import parse
from riffle.common.protocol.errors import RemoteError
from riffle.coordinator.batches.analyzer import Analyzer
from riffle.coordinator.batches.counts import CountCheck
from riffle.coordinator.batches.issue import Issuer
from riffle.coordinator.batches.shuffler_client import Messages
from riffle.coordinator.learners.registry import problem
from riffle.coordinator.runs import learner
from riffle.coordinator.runs.coordinator import Coordinator
from tests.coordinator.faults import Breaking, outcome, read
from tests.coordinator.learner import Tiny
from tests.coordinator.world import (
    ANALYZER,
    NOW,
    RUN,
    SHUFFLER_ID,
    FakeShuffler,
    one_key,
    parts,
    play,
    run_to_end,
    sealed_messages,
    spec,
)


def test_a_run_has_the_counts_stages_and_answer_of_messages(tmp_path: Path) -> None:
    for aggregation in ("messages", "sums"):
        run_to_end(parts(tmp_path / aggregation, FakeShuffler()), spec(aggregation=aggregation))
    messages, sums = (outcome(tmp_path / name) for name in ("messages", "sums"))
    assert {i: h[:-1] for i, h in sums["histograms"].items()} == {
        i: h[:-1] for i, h in messages["histograms"].items()
    }
    for same in ("state", "stages", "states", "events"):
        assert sums[same] == messages[same]
    for entry in sums["ledger"]:
        assert (entry.messages, entry.opened, entry.failed) == (20, 20, 0)
        assert entry.spend.epsilon_upper <= 4.0
        assert entry.spend.within_promise


def test_worker_processes_unmask_as_one_would_and_refuse_other_sizes() -> None:
    deployment = Tiny(problem(spec())).next_deployment()
    assert deployment is not None
    issuer = Issuer(SHUFFLER_ID, ANALYZER.public.hex, lambda: NOW)
    data = issuer.issue(RUN, spec(aggregation="sums"), deployment, index=0, step=0).data
    messages = issuer.issue(RUN, spec(), deployment, index=0, step=0).data
    results = []
    for workers, each in ((1, data), (2, data), (2, messages)):
        analyzer = Analyzer(one_key(ANALYZER), workers)
        try:
            release = Messages(sealed_messages(each), "")
            results.append(asyncio.run(analyzer.open(parse(each), release)))
        finally:
            analyzer.close()
    analyzer = Analyzer(one_key(ANALYZER), 1)
    for other in (sealed_messages(data)[:-1], sealed_messages(data) + b"x"):
        with pytest.raises(RemoteError, match="bytes of messages"):
            asyncio.run(analyzer.open(parse(data), Messages(other, "")))
    analyzer.close()
    assert (results[1].opened, results[1].failed, results[1].named) == (20, 0, ())
    for result in results:
        assert np.array_equal(result.histogram[:-1], results[2].histogram[:-1])


@pytest.mark.parametrize(("lie", "at"), [(1_000, 0), (-1_000, 0), (30_000, 0), (1_000, 1)])
def test_a_large_lie_rejects_the_batch_and_no_learner_sees_it(
    lie: int, at: int, tmp_path: Path
) -> None:
    """In a later batch as in the first one."""
    shuffler = FakeShuffler()
    shuffler.lies = {at: lie}
    run_to_end(parts(tmp_path, shuffler), spec(aggregation="sums", reissues=1))
    result = outcome(tmp_path)
    states = ["counted"] * 3
    states[at] = "rejected"
    assert [state for state, _, _ in result["states"]] == states
    assert (result["state"][0], at in result["histograms"]) == ("finished", False)
    counted = list(result["ledger"])
    rejected = counted.pop(at)
    assert not rejected.spend.within_promise
    assert rejected.check is not None
    assert rejected.check.suspicious
    assert all(entry.spend.within_promise for entry in counted)
    events = read(tmp_path, lambda store: store.events(RUN))
    told = [event.data for event in events if event.kind == "batch_rejected"]
    assert [(one["suspicious"], one["test"]) for one in told] == [(True, rejected.check.test)]
    assert 0 < rejected.spend.epsilon_upper <= 4.0, "its users have reported, so it is spent"


@pytest.mark.parametrize(("needed", "state"), [(2, "counted"), (3, "rejected")])
def test_what_reports_without_data_explain_rejects_no_batch(
    needed: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest people are slow, or their environment fails. gamma = 10 % of 20 reports is two."""

    def explained(_: object, __: object, without_data: int = 0) -> CountCheck:
        return CountCheck("total", 9.0, 1.0 if without_data >= needed else 0.0)

    monkeypatch.setattr(learner, "check", explained)
    run_to_end(parts(tmp_path, FakeShuffler()), spec(aggregation="sums", reissues=0))
    result = outcome(tmp_path)
    assert result["states"][0][0] == state
    first = result["ledger"][0].check
    assert first is not None
    assert first.suspicious, "marked all the same"


def test_lies_in_every_try_fail_the_run_with_the_test_that_found_them(tmp_path: Path) -> None:
    shuffler = FakeShuffler()
    shuffler.lies = dict.fromkeys(range(9), 5_000)
    run_to_end(parts(tmp_path, shuffler), spec(aggregation="sums", reissues=1))
    state, message, _ = outcome(tmp_path)["state"]
    assert state == "failed"
    assert "its counts fail the test" in message


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [("shuffler", "messages"), ("analyzer", "open")])
def test_a_crash_gives_the_same_sum_again(step: tuple[str, str], when: str, tmp_path: Path) -> None:
    run_to_end(parts(tmp_path / "whole", FakeShuffler()), spec(aggregation="sums"))
    shuffler = FakeShuffler()
    given = parts(tmp_path / "broken", shuffler)
    target = shuffler if step[0] == "shuffler" else given.analyzer
    broken: Any = Breaking(target, step[1], 1, when)
    run_to_end(replace(given, **{step[0]: broken}), spec(aggregation="sums"))
    run_to_end(parts(tmp_path / "broken", shuffler))
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")


def test_a_run_with_an_aggregation_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    async def act(coordinator: Coordinator) -> None:
        coordinator.aggregations = ("messages",)
        with pytest.raises(RemoteError) as caught:
            await coordinator.create(spec(aggregation="sums"))
        assert caught.value.slug == "trust-refused"

    play(parts(tmp_path, FakeShuffler()), act)


def test_sums_are_for_the_shuffle_only() -> None:
    with pytest.raises(ValueError, match="'shuffle' only"):
        spec(trust="local", aggregation="sums")
