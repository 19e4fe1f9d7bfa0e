"""The store: one count a batch, refused transitions, budget, versions, damaged files."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from riffle.common.mechanism.policy import Mixture
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.database import Head
from riffle.coordinator.batches.analyzer import OpenedBatch
from riffle.coordinator.batches.issue import Issue, Issuer
from riffle.coordinator.batches.ledger import Spend, planned
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.runs.learner import replay
from riffle.coordinator.store.records import NextStep, RunLease, Settlement
from riffle.coordinator.store.schema import meta, run_leases
from riffle.coordinator.store.transactions import Store
from tests.coordinator.conftest import both_engines
from tests.coordinator.world import NOW, SHUFFLER_ID, open_store, runs_with_work, spec
from tests.coordinator.world import RUN as RUN_ID

pytestmark = both_engines

MANUAL = spec(learner="manual")
LEASE = RunLease(RUN_ID, 1)


def issued(index: int, n: int = 20, run_id: str = RUN_ID) -> Issue:
    deployment = Deployment(index, "manual", Mixture.single([[0, 0], [0, 0]]), n, 0)
    issuer = Issuer(SHUFFLER_ID, lambda: "0" * 64, lambda: NOW)
    return issuer.issue(run_id, MANUAL, deployment, index=index, step=index)


def settlement(index: int = 0, **changes: Any) -> Settlement:
    plan = Settlement(
        index=index,
        spend=planned(issued(0).descriptor),
        opened=OpenedBatch(np.arange(9), opened=36, failed=1, messages_sha256="0" * 64),
        timings={"opening": 1.0},
    )
    return replace(plan, **changes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    opened.create_run(RUN_ID, MANUAL, issued(0), NOW, "me", NOW + 15)
    yield opened
    opened.close()


def to_sealed(store: Store, index: int = 0) -> None:
    store.record_deposit(LEASE, index, NOW)
    store.record_seal(LEASE, index, 20, {"waiting": 1.0}, NOW)


def test_the_descriptors_bytes_are_kept_as_they_are(store: Store) -> None:
    (row,) = store.deployments(RUN_ID)
    assert row.data == issued(0).data
    assert row.state == "issued"
    assert store.next_work(RUN_ID)[1] == row


def test_a_batch_is_counted_once(store: Store) -> None:
    to_sealed(store)
    store.settle(LEASE, settlement(), NOW)
    with pytest.raises(LocalError, match="'count' is not possible in the state 'counted'"):
        store.settle(LEASE, settlement(), NOW)
    assert len(store.ledger(RUN_ID)) == 1
    assert store.histograms(RUN_ID)[0].tolist() == list(range(9))


def test_nothing_that_happens_to_a_run_changes_another(store: Store) -> None:
    other = "cd" * 16
    theirs = store.create_run(other, MANUAL, issued(0, run_id=other), NOW, "they", NOW + 15)
    assert theirs is not None
    store.record_deposit(theirs, 0, NOW)
    store.record_seal(theirs, 0, 20, {}, NOW)
    opened = settlement().opened
    store.release(theirs, 0, replace(opened, failed=2))

    def seen() -> list[object]:
        leases = select(run_leases).where(run_leases.c.run_id == other)
        with store._engine.connect() as connection:
            lease = connection.execute(leases).one()
        rows = [read(other) for read in (store.run, store.deployments, store.events, store.ledger)]
        return [*rows, lease, repr(store.released(other, 0)), repr(store.histograms(other))]

    acts: list[Callable[[], object]] = [
        lambda: store.record_deposit(LEASE, 0, NOW),
        lambda: store.record_seal(LEASE, 0, 20, {}, NOW),
        lambda: store.release(LEASE, 0, opened),
        lambda: store.settle(LEASE, settlement(next=NextStep(issue=issued(1))), NOW),
        lambda: store.record_acknowledgement(LEASE, 0, {}),
        lambda: store.record_trouble(LEASE, "waits"),
        lambda: store.renew_leases([LEASE], NOW + 100),
        lambda: store.stop(RUN_ID, NOW),
        lambda: store.abandon(LEASE, 1, 0, NextStep(), NOW),
    ]
    before = seen()
    for act in acts:
        act()
        assert seen() == before


def test_a_batch_that_is_not_sealed_is_not_counted(store: Store) -> None:
    with pytest.raises(LocalError, match="'count' is not possible in the state 'issued'"):
        store.settle(LEASE, settlement(), NOW)
    assert store.ledger(RUN_ID) == []


def test_a_deployment_beyond_the_budget_is_refused_with_all_that_came_with_it(
    store: Store,
) -> None:
    to_sealed(store)
    before = store.events(RUN_ID)
    too_much = replace(issued(1), spend=Spend(4.0, 4.1, 0.01, 2, True))
    with pytest.raises(LocalError, match="budget"):
        store.settle(LEASE, settlement(next=NextStep(issue=too_much)), NOW)
    assert store.ledger(RUN_ID) == []
    assert store.histograms(RUN_ID) == {}
    assert store.events(RUN_ID) == before
    assert [row.state for row in store.deployments(RUN_ID)] == ["sealed"]


def test_a_first_deployment_beyond_the_budget_makes_no_run(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    too_much = replace(issued(0), spend=Spend(0.0, 1.0, 0.02, 2, True))
    with pytest.raises(LocalError, match="budget"):
        store.create_run(RUN_ID, MANUAL, too_much, NOW, "me", NOW)
    assert store.runs() == []
    store.close()


def test_a_manual_deployment_beyond_the_budget_is_refused(store: Store) -> None:
    to_sealed(store)
    store.settle(LEASE, settlement(), NOW)
    too_much = replace(issued(1), spend=Spend(4.0, 4.1, 0.01, 2, True))
    with pytest.raises(LocalError, match="budget"):
        store.issue_manual(RUN_ID, too_much, NOW)
    assert len(store.deployments(RUN_ID)) == 1


def test_a_weaker_batch_is_recorded_without_counts(store: Store) -> None:
    to_sealed(store)
    weaker = Spend(5.0, 5.1, 0.01, 3, False)
    store.settle(LEASE, settlement(spend=weaker, next=NextStep(issue=issued(1))), NOW)
    (entry,) = store.ledger(RUN_ID)
    assert entry.spend == weaker
    assert store.histograms(RUN_ID) == {}
    assert [row.state for row in store.deployments(RUN_ID)] == ["rejected", "issued"]


def test_the_census_separates_unbounded_epsilons(store: Store) -> None:
    empty = store.census()
    assert (empty.opened, empty.failed, empty.epsilon, empty.seeded) == (0, 0, 0.0, 0)
    for index, upper in enumerate((0.25, math.inf)):
        if index:
            store.issue_manual(RUN_ID, issued(index), NOW)
        to_sealed(store, index)
        spend = Spend(0.1, upper, 0.01, 0, True)
        store.settle(LEASE, settlement(index, spend=spend), NOW)
    result = store.census()
    assert (result.opened, result.failed, result.epsilon, result.seeded) == (72, 2, 0.25, 1)
    assert result.batches == {"counted": 2}


def test_an_ended_run_takes_no_next_deployment(store: Store) -> None:
    to_sealed(store)
    store.stop(RUN_ID, NOW)
    with pytest.raises(LocalError, match="is stopped"):
        store.settle(LEASE, settlement(next=NextStep(issue=issued(1))), NOW)
    store.settle(LEASE, settlement(), NOW)
    assert [row.state for row in store.deployments(RUN_ID)] == ["counted"]
    with pytest.raises(RemoteError, match="is stopped"):
        store.issue_manual(RUN_ID, issued(1), NOW)


@pytest.mark.parametrize("at", [0, 1], ids=["counted", "issued"])
@pytest.mark.parametrize("wanted", [None, 40, 20])
def test_a_learner_that_asks_for_another_deployment_is_not_replayed(
    store: Store, wanted: int | None, at: int
) -> None:
    """Its code has changed since: what it would count is not what was deployed."""
    to_sealed(store)
    store.settle(LEASE, settlement(next=NextStep(issue=issued(1))), NOW)
    rows = store.deployments(RUN_ID)
    deployments: list[Deployment | None] = [row.deployment for row in rows]
    deployments[at] = None if wanted is None else replace(rows[at].deployment, n=wanted)
    asked = iter(deployments)

    class Changed:
        def next_deployment(self) -> Deployment | None:
            return next(asked)

        def observe(self, _: object) -> None:
            pass

    learner: Any = Changed()
    if wanted == rows[at].n:
        replay(learner, rows, store.histograms(RUN_ID))
        return
    with pytest.raises(LocalError, match="asks for another one"):
        replay(learner, rows, store.histograms(RUN_ID))


def test_work_ends_with_the_acknowledgement(store: Store) -> None:
    to_sealed(store)
    store.settle(LEASE, settlement(next=NextStep(finished=True)), NOW)
    assert runs_with_work(store) == [RUN_ID]
    store.record_acknowledgement(LEASE, 0, {"storing": 1.0})
    assert runs_with_work(store) == []
    assert store.next_work(RUN_ID)[1] is None


def test_a_run_is_created_once(store: Store) -> None:
    assert store.create_run(RUN_ID, MANUAL, issued(0), NOW, "me", NOW) is None
    with pytest.raises(RemoteError, match="another spec"):
        store.create_run(RUN_ID, spec(), issued(0), NOW, "me", NOW)


def test_the_same_index_is_not_issued_twice(store: Store) -> None:
    to_sealed(store)
    with pytest.raises(IntegrityError):
        store.settle(LEASE, settlement(next=NextStep(issue=issued(0))), NOW)
    assert store.ledger(RUN_ID) == []


def test_events_are_numbered_within_their_run(store: Store) -> None:
    other = "f" * 32
    store.create_run(other, spec(learner="manual", run_id=other), None, NOW, "me", NOW)
    to_sealed(store)
    assert [event.id for event in store.events(RUN_ID)] == [1, 2, 3]
    assert [event.id for event in store.events(other)] == [1]
    assert [event.id for event in store.events(RUN_ID, after=2)] == [3]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"not a database, " * 1000)
    with pytest.raises(LocalError, match="cannot be used"):
        Store(f"sqlite:///{path}", Head(tmp_path, "", meta))


def test_a_missing_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be used"):
        Store(f"sqlite:///{tmp_path / 'absent' / 'store.sqlite'}", Head(tmp_path, "", meta))


def test_the_head_never_has_a_number_that_the_store_may_lose(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service killed in between would take its own store for an older copy."""
    write, durable = Head.write, list[bool]()

    def looking(of: Head, number: int) -> None:
        with store._engine.connect() as connection:
            durable.append(of._read(connection) >= number)
        write(of, number)

    monkeypatch.setattr(Head, "write", looking)
    to_sealed(store)
    store.settle(LEASE, settlement(), NOW)
    store.stop(RUN_ID, NOW)
    assert durable == [True] * 4
