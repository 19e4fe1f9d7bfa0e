"""Local and central batches through the loop: one draw of noise, spend, conservation."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.workflow import count
from riffle.common.protocol.descriptor import BatchDescriptor, parse
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.hpke import open_each
from riffle.common.protocol.signatures import batch_id
from riffle.coordinator.batches.analyzer import OpenedBatch
from riffle.coordinator.batches.counts import CountCheck, private_counts
from riffle.coordinator.batches.ledger import planned, spent
from riffle.coordinator.learners.registry import Registry, problem
from riffle.coordinator.learning.learner import BatchCounts, LearnerError, StageResult
from riffle.coordinator.runs import learner
from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.store.records import RunLease, pack
from riffle.coordinator.store.transactions import Store
from tests.common.descriptors import ONE_MESSAGE, descriptor
from tests.coordinator.conftest import both_engines
from tests.coordinator.faults import Breaking, outcome, read
from tests.coordinator.learner import Tiny
from tests.coordinator.world import (
    ANALYZER,
    RUN,
    FakeShuffler,
    parts,
    play,
    run_to_end,
    sealed_messages,
    spec,
)

CENTRAL: dict[str, Any] = {"trust": "central", "epsilon": 0.5}
"""At this epsilon two draws on the eight counters of the smaller batch agree once in 1e7 runs."""

STEPS = (
    ("shuffler", "messages"),
    ("analyzer", "open"),
    ("store", "release"),
    ("store", "settle"),
    ("shuffler", "acknowledge"),
)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[int]]]:
    """Every histogram that a learner was shown, by batch."""
    seen: dict[str, list[list[int]]] = {}

    def watched(d: BatchDescriptor, histogram: Ints) -> BatchCounts:
        seen.setdefault(d.batch_id, []).append(histogram.tolist())
        return private_counts(d, histogram)

    monkeypatch.setattr(learner, "private_counts", watched)
    return seen


def raw_counts(data: bytes) -> Ints:
    """The counts before the coordinator's noise, which it must not keep."""
    context = parse(data)
    d, sealed = context.descriptor, sealed_messages(data)
    each = [sealed[i : i + d.message_bytes] for i in range(0, len(sealed), d.message_bytes)]
    plain = b"".join(filter(None, open_each(ANALYZER.private, context.message_info, each)))
    return count(d.trust, d.layout, d.symbols.read(plain))[0]


def assert_one_draw(directory: Path, shown: dict[str, list[list[int]]]) -> None:
    """The learner saw only the histogram that the store holds, and that is not the raw counts."""

    def look(store: Store) -> None:
        histograms = store.histograms(RUN)
        for row in store.deployments(RUN):
            stored = histograms[row.index].tolist()
            assert all(histogram == stored for histogram in shown.get(row.batch_id, []))
            assert stored != raw_counts(row.data).tolist()
            assert stored[-1] == row.n
            assert store.released(RUN, row.index) is None, "settled, so kept in one place only"

    read(directory, look)


@pytest.mark.parametrize("trust", ["local", "central"])
@pytest.mark.parametrize(("broken", "state"), [(2, "counted"), (3, "rejected")])
def test_dishonest_reports_past_gamma_reject_a_batch_under_every_trust_model(
    broken: int, state: str, trust: str, tmp_path: Path, shown: dict[str, list[list[int]]]
) -> None:
    """gamma = 10 % of 20 reports is two, and a report is one message."""
    shuffler = FakeShuffler()
    shuffler.broken = {0: broken}
    run_to_end(parts(tmp_path, shuffler), spec(trust=trust, reissues=0))
    result = outcome(tmp_path)
    assert result["states"][0][0] == state
    assert (0 in result["histograms"]) == (batch_id(RUN, 0) in shown) == (state == "counted")


@pytest.mark.parametrize("trust", ["shuffle", "local", "central"])
def test_marked_counts_of_messages_are_used_all_the_same(
    trust: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "check", lambda *_, **__: CountCheck("total", 9.0, 0.0))
    run_to_end(parts(tmp_path, FakeShuffler()), spec(trust=trust, reissues=0))
    result = outcome(tmp_path)
    assert {state for state, _, _ in result["states"]} == {"counted"}
    assert [entry.check.suspicious for entry in result["ledger"]] == [True, True]


@both_engines
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("part", "method"), STEPS)
def test_central_noise_is_used_once_whatever_crashes(
    part: str, method: str, when: str, tmp_path: Path, shown: dict[str, list[list[int]]]
) -> None:
    shuffler, given = FakeShuffler(), parts(tmp_path, FakeShuffler())
    breaking: Any = Breaking(
        shuffler if part == "shuffler" else getattr(given, part), method, 1, when
    )
    run_to_end(replace(given, **{"shuffler": shuffler, part: breaking}), spec(**CENTRAL))
    run_to_end(parts(tmp_path, shuffler))
    assert read(tmp_path, lambda store: store.run(RUN).state) == "finished"
    assert_one_draw(tmp_path, shown)


def test_a_learner_that_fails_does_not_make_a_second_draw(
    tmp_path: Path, shown: dict[str, list[list[int]]]
) -> None:
    """Its reported error may depend on the noise, so the recorded counts must be the same ones."""

    class Choking(Tiny):
        def observe(self, counts: BatchCounts) -> StageResult | None:
            raise LearnerError(f"cannot learn from {counts.transitions.sum():.1f}")

    registry = Registry({"choking": lambda given, preset, options: Choking(given)})
    given = replace(parts(tmp_path, FakeShuffler()), registry=registry)
    run_to_end(given, spec(learner="choking", **CENTRAL))
    assert read(tmp_path, lambda store: store.run(RUN).state) == "failed"
    assert list(map(len, shown.values())) == [1]
    assert_one_draw(tmp_path, shown)


def test_the_first_committed_of_two_draws_is_used(tmp_path: Path) -> None:
    run_to_end(parts(tmp_path, FakeShuffler()), spec())
    first, second = (OpenedBatch(np.array([i, 20]), 20, 0, "0" * 64) for i in (1, 2))

    def look(store: Store) -> None:
        assert store.release(RunLease(RUN, 1), 0, first).histogram.tolist() == [1, 20]
        committed = store.release(RunLease(RUN, 1), 0, second)
        assert (committed.histogram.tolist(), committed.opened) == ([1, 20], 20)

    read(tmp_path, look)


def test_raw_counts_reach_neither_the_store_nor_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    run_to_end(parts(tmp_path, FakeShuffler()), spec(**CENTRAL))
    rows = read(tmp_path, lambda store: store.deployments(RUN))
    files = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    for row in rows:
        raw = raw_counts(row.data)
        assert raw[:-1].sum() > 0
        assert pack(raw)[:-8] not in files
        assert str(raw.tolist()[:-1])[1:-1] not in caplog.text
    stored = read(tmp_path, lambda store: store.histograms(RUN))
    assert pack(stored[0]) in files, "the search would have found them"


@pytest.mark.parametrize("trust", ["local", "central"])
def test_one_message_a_report_and_the_budget(trust: str, tmp_path: Path) -> None:
    run_to_end(parts(tmp_path, FakeShuffler()), spec(trust=trust))
    result = outcome(tmp_path)
    assert result["state"][0] == "finished"
    for entry in result["ledger"]:
        assert (entry.messages, entry.opened, entry.failed) == (20, 20, 0)
        assert 3.9 < entry.spend.epsilon_upper <= 4.0


@pytest.mark.parametrize("trust", ["local", "central"])
def test_broken_reports_weaken_nobody_else(trust: str, tmp_path: Path) -> None:
    """Two of 20 are promised; a third makes the batch useless, and no less private."""
    shuffler = FakeShuffler()
    shuffler.broken = {0: 2, 1: 3}
    run_to_end(parts(tmp_path, shuffler), spec(trust=trust, reissues=1))
    result = outcome(tmp_path)
    assert [state for state, _, _ in result["states"]] == ["counted", "rejected", "counted"]
    assert [entry.failed for entry in result["ledger"]] == [2, 3, 0]
    assert result["histograms"][0][-1] == 18
    for entry in result["ledger"]:
        assert entry.spend.epsilon_upper <= 4.0


@pytest.mark.parametrize("trust", ["local", "central"])
def test_the_ledger_counts_on_nobody_else(trust: str) -> None:
    d = descriptor(**ONE_MESSAGE[trust])
    assert spent(d, d.n).epsilon_upper == planned(d).epsilon_upper < np.inf
    assert not spent(d, d.n).within_promise
    seeded = descriptor(test_seed=1, **ONE_MESSAGE[trust])
    assert planned(seeded).epsilon_upper == np.inf


def test_learners_get_the_variance_of_the_trust_model() -> None:
    shuffle, local, central = (problem(spec(trust=t)) for t in ("shuffle", "local", "central"))
    assert local.noise(40, 0) == pytest.approx(2 * local.noise(20, 0)), "every user adds noise"
    assert central.noise(40, 0) == central.noise(20, 0) < local.noise(20, 0)
    assert central.noise(20, 0) < shuffle.noise(20, 0) < local.noise(20, 0)


@pytest.mark.parametrize("what", ["calibration", "constants"])
def test_the_papers_constants_are_for_the_shuffle_only(what: str) -> None:
    with pytest.raises(ValueError, match="trust 'shuffle' only"):
        spec(trust="local", **{what: "paper"})


def test_a_budget_too_small_for_any_noise_is_refused_at_once(tmp_path: Path) -> None:
    async def act(coordinator: Coordinator) -> None:
        with pytest.raises(RemoteError, match="ask for more epsilon"):
            await coordinator.create(spec(trust="local", epsilon=1e-7, beta=1e-12))

    play(parts(tmp_path, FakeShuffler()), act)
