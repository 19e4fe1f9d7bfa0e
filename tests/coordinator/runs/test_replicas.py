"""Leases of runs and their fences; two coordinators on one store, one of which is killed."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from sqlalchemy import select, update

from riffle.coordinator.runs.coordinator import Coordinator, Drivers
from riffle.coordinator.specs import ManualDeployment
from riffle.coordinator.store import schema
from riffle.coordinator.store.events import STOPPED, ChangeSignals
from riffle.coordinator.store.records import LeaseLostError, NextStep, RunLease
from riffle.coordinator.store.transactions import Store
from tests.coordinator.conftest import both_engines
from tests.coordinator.faults import outcome
from tests.coordinator.lease import LEASE, LeaseEvent, LeaseState
from tests.coordinator.store.test_transactions import MANUAL, issued, settlement, to_sealed
from tests.coordinator.world import (
    NOW,
    RUN,
    FakeShuffler,
    Parts,
    drivers_end,
    open_store,
    parts,
    runs_with_work,
    spec,
    tasks_of_drivers,
    until,
)
from tests.postgres import during_commit

pytestmark = both_engines
FIRST, SECOND = RunLease(RUN, 1), RunLease(RUN, 2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    assert opened.create_run(RUN, MANUAL, issued(0), NOW, "first", NOW + 15) == FIRST
    yield opened
    opened.close()


def take(store: Store, holder: str, now: float, *, start: bool = False) -> list[RunLease]:
    return store.take_leases(holder, now, now + 15, start=start)


# -- leases -------------------------------------------------------------------------------------


def test_a_run_is_driven_by_one_until_its_time_is_over(store: Store) -> None:
    assert take(store, "second", NOW + 14) == []
    assert take(store, "second", NOW + 15) == [SECOND]
    assert take(store, "third", NOW + 15) == []
    assert take(store, "first", NOW + 30) == [RunLease(RUN, 3)]


def test_a_lease_that_is_held_lasts_longer_and_one_given_up_ends(store: Store) -> None:
    assert store.renew_leases([FIRST], NOW + 100) == []
    assert take(store, "second", NOW + 99) == []
    assert store.renew_leases([FIRST], 0.0) == []
    assert take(store, "second", NOW) == [SECOND]
    assert store.renew_leases([FIRST], NOW + 100) == [FIRST], "it was lost"
    assert take(store, "third", NOW + 14) == []


def test_a_restart_takes_what_its_predecessor_held(store: Store, engine: str) -> None:
    assert take(store, "second", NOW, start=True) == ([] if engine == "postgresql" else [SECOND])
    mine = take(store, "first", NOW, start=True)
    assert [lease.run_id for lease in mine] == [RUN]


def test_a_start_takes_what_nobody_drives_any_more(store: Store) -> None:
    assert take(store, "second", NOW + 15, start=True) == [SECOND]


def test_a_run_without_work_is_not_taken(store: Store) -> None:
    to_sealed(store)
    store.settle(FIRST, settlement(next=NextStep(finished=True)), NOW)
    store.record_acknowledgement(FIRST, 0, {})
    assert take(store, "second", NOW + 100) == []


LATE: list[tuple[str, Callable[[Store], None]]] = [
    ("deposit", lambda store: store.record_deposit(FIRST, 0, NOW)),
    ("seal", lambda store: store.record_seal(FIRST, 0, 20, {}, NOW)),
    ("settle", lambda store: store.settle(FIRST, settlement(), NOW)),
    ("abandon", lambda store: store.abandon(FIRST, 0, 20, NextStep(), NOW)),
    ("acknowledge", lambda store: store.record_acknowledgement(FIRST, 0, {})),
    ("fail", lambda store: store.fail(FIRST, "late", NOW)),
]


@pytest.mark.parametrize(("step", "act"), LATE, ids=[step for step, _ in LATE])
def test_a_driver_without_its_lease_changes_nothing(
    store: Store, step: str, act: Callable[[Store], None]
) -> None:
    """In whatever state the run is, so it is the fence that refuses, not the state."""
    advance_to(step, store)
    assert take(store, "second", NOW + 15) == [SECOND]
    before = (store.run(RUN), store.deployments(RUN), store.events(RUN), store.ledger(RUN))
    with pytest.raises(LeaseLostError, match="another replica"):
        act(store)
    assert (store.run(RUN), store.deployments(RUN), store.events(RUN), store.ledger(RUN)) == before


@pytest.mark.parametrize(("step", "act"), LATE, ids=[step for step, _ in LATE])
@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_a_driver_that_loses_its_lease_meanwhile_changes_nothing(
    store: Store, step: str, act: Callable[[Store], None]
) -> None:
    advance_to(step, store)
    take_over = update(schema.run_leases).values(fence=SECOND.fence)
    before = (store.run(RUN), store.deployments(RUN), store.events(RUN), store.ledger(RUN))
    with pytest.raises(LeaseLostError, match="another replica"):
        during_commit(store._engine, lambda other: other.execute(take_over), lambda: act(store))
    assert (store.run(RUN), store.deployments(RUN), store.events(RUN), store.ledger(RUN)) == before


def advance_to(step: str, store: Store) -> None:
    """Brings the first deployment to the state before a step."""
    if step == "seal":
        store.record_deposit(FIRST, 0, NOW)
    elif step in ("settle", "acknowledge"):
        to_sealed(store)


LEASE_EVENTS: dict[LeaseEvent, Callable[[Store, float], Any]] = {
    "write": lambda store, now: store.fail(FIRST, "", now),
    "renew": lambda store, now: lost_as_error(store.renew_leases([FIRST], now + 15)),
    "release": lambda store, now: lost_as_error(store.renew_leases([FIRST], 0.0)),
    "take": lambda store, now: take(store, "second", now),
}


def lost_as_error(lost: list[RunLease]) -> None:
    for lease in lost:
        raise LeaseLostError(lease.run_id)


def lease_state(store: Store, now: float) -> LeaseState:
    """The state of the first lease, from its row."""
    table = schema.run_leases.c
    with store._engine.connect() as connection:
        fence, until = connection.execute(select(table.fence, table.until)).one()
    return "lost" if fence != FIRST.fence else "held" if until > now else "expired"


@pytest.mark.parametrize("event", LEASE_EVENTS)
@pytest.mark.parametrize("state", get_args(LeaseState))
def test_the_store_follows_the_table_of_leases(
    store: Store, state: LeaseState, event: LeaseEvent
) -> None:
    now = NOW if state == "held" else NOW + 15
    if state == "lost":
        assert take(store, "third", now) == [SECOND]
    assert lease_state(store, now) == state
    target = LEASE.get((state, event))
    if target is not None:
        LEASE_EVENTS[event](store, now)
    elif event == "take":  # nothing of this lease: it is held, or another one is
        assert LEASE_EVENTS[event](store, now) == []
    else:
        with pytest.raises(LeaseLostError):
            LEASE_EVENTS[event](store, now)
    assert lease_state(store, now) == (target or state)


# -- two coordinators -----------------------------------------------------------------------------


class Listening(ChangeSignals):
    """Notes whether its coordinator listens: its first notification is that any may be missed."""

    listens = False

    def fire_all(self) -> None:
        self.listens = True
        super().fire_all()


@asynccontextmanager
async def replica(given: Parts, name: str) -> AsyncIterator[Coordinator]:
    coordinator = given.coordinator(name, lease_seconds=0.3)
    await coordinator.start()
    try:
        async with asyncio.timeout(30):
            yield coordinator
    finally:
        await coordinator.close()
        given.close()


def driven(coordinator: Coordinator) -> bool:
    return RUN in coordinator.drivers.driven


def is_free(directory: Path) -> bool:
    """Tells whether another replica can take the run at once."""
    store = open_store(directory)
    try:
        return bool(take(store, "two", NOW))
    finally:
        store.close()


def test_a_notification_of_a_stop_starts_no_driver_after_the_end(tmp_path: Path) -> None:
    """The replica ends while it restarts a driver."""

    class Slow(FakeShuffler):
        async def status(self, batch_id: str, wait: float) -> Any:
            try:
                return await super().status(batch_id, wait)
            finally:
                await asyncio.sleep(0.05)

    shuffler = Slow()
    shuffler.fills = False

    async def scenario() -> None:
        async with replica(parts(tmp_path, shuffler), "one") as one:
            await one.create(spec())
            await until(lambda: "status" in shuffler.calls)
            one._notified(STOPPED + RUN)
            await asyncio.sleep(0)
        assert tasks_of_drivers() == set()

    asyncio.run(scenario())
    assert is_free(tmp_path)


def test_a_run_that_is_taken_at_the_end_is_given_up(tmp_path: Path) -> None:
    """The replica ends while it takes a run that nobody drives."""
    result = threading.Event()

    async def scenario() -> None:
        given = parts(tmp_path, FakeShuffler())
        async with replica(given, "one"):
            take = given.store.take_leases

            def slowly(*args: Any, **kwargs: Any) -> list[RunLease]:
                taken: list[RunLease] = take(*args, **kwargs)
                if taken:
                    result.set()
                    time.sleep(0.2)
                return taken

            given.store.take_leases = slowly
            killed = open_store(tmp_path)
            killed.create_run(RUN, MANUAL, issued(0), NOW, "killed", NOW)
            killed.close()
            await until(result.is_set)

    asyncio.run(scenario())
    assert is_free(tmp_path)


def test_nothing_uses_the_store_after_the_end(tmp_path: Path) -> None:
    """The replica ends while it looks for batches that its store lacks."""
    given = parts(tmp_path, FakeShuffler())
    batch_ids, steps = given.store.batch_ids, []

    def slowly() -> set[str]:
        steps.append("began")
        time.sleep(0.2)
        found: set[str] = batch_ids()
        steps.append("ended")
        return found

    given.store.batch_ids = slowly

    async def scenario() -> None:
        async with replica(given, "one"):
            await until(lambda: bool(steps))
        assert steps == ["began", "ended"]

    asyncio.run(scenario())


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
class TestTwo:
    """On PostgreSQL only: a SQLite store belongs to one coordinator."""

    def test_a_run_goes_on_elsewhere_when_its_coordinator_ends(
        self, tmp_path: Path, undisturbed: dict[str, Any]
    ) -> None:
        shuffler = FakeShuffler()
        shuffler.fills = False

        async def scenario() -> None:
            async with replica(parts(tmp_path, shuffler), "two") as two:
                async with replica(parts(tmp_path, shuffler), "one") as one:
                    await one.create(spec())
                    await asyncio.sleep(0.5)
                    assert driven(one), "it renews its lease in time"
                    assert not driven(two)
                await until(lambda: driven(two))
                shuffler.fills = True
                await drivers_end()

        asyncio.run(scenario())
        assert outcome(tmp_path) == undisturbed

    def test_one_that_sleeps_beyond_its_lease_wakes_up_to_nothing(
        self, tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its driver is in the middle of a step when another takes over: the fence refuses it."""
        shuffler = FakeShuffler()

        async def scenario() -> None:
            first, second = parts(tmp_path, shuffler), parts(tmp_path, shuffler)
            async with replica(first, "one") as one:
                asleep, wake = asyncio.Event(), asyncio.Event()
                opener = first.analyzer.open

                async def open_late(*args: Any) -> Any:
                    opening = await opener(*args)
                    asleep.set()
                    await wake.wait()
                    return opening

                async def no_renewal(_: Drivers) -> None:
                    await asyncio.sleep(3600)

                monkeypatch.setattr(first.analyzer, "open", open_late)
                one.drivers._renewing.cancel()  # type: ignore[union-attr]
                await one.create(spec())
                await asleep.wait()
                sleeper = one.drivers.driven[RUN][1]
                async with replica(second, "two") as two:
                    second.clock.now += 15
                    await until(lambda: driven(two))
                    wake.set()
                    await asyncio.wait([sleeper])
                    assert sleeper.exception() is None
                    assert not driven(one)
                    await drivers_end()

        asyncio.run(scenario())
        assert outcome(tmp_path) == undisturbed

    def test_a_run_is_stopped_through_the_other_at_once(self, tmp_path: Path) -> None:
        class Patient(FakeShuffler):
            async def status(self, batch_id: str, wait: float) -> Any:
                if wait:
                    self.calls.append("wait")
                    await asyncio.Event().wait()  # a long poll that nothing ends
                return await super().status(batch_id, 0.0)

        shuffler = Patient()
        shuffler.fills = False

        async def scenario() -> None:
            signals = Listening()
            first = replace(parts(tmp_path, shuffler), signals=signals)
            second = parts(tmp_path, shuffler)
            async with replica(first, "one") as one, replica(second, "two") as two:
                await one.create(spec())
                await until(lambda: signals.listens)
                await until(lambda: "wait" in shuffler.calls)
                await two.stop(RUN)
                assert second.store.run(RUN).state == "stopped"
                await until(lambda: not runs_with_work(second.store))

        asyncio.run(scenario())

    def test_a_client_of_one_replica_sees_a_deployment_through_the_other(
        self, tmp_path: Path
    ) -> None:
        async def scenario() -> float:
            async with (
                replica(parts(tmp_path, FakeShuffler()), "one") as one,
                replica(parts(tmp_path, FakeShuffler()), "two") as two,
            ):
                await one.create(spec(learner="manual"))
                waiting = asyncio.create_task(one.newest_deployment(RUN, None, 20))
                await asyncio.sleep(0.2)
                clock = asyncio.get_running_loop().time
                started = clock()
                wanted = ManualDeployment(policy=((0, 0), (0, 0)), episodes=20, layer=0)
                assert (await two.deploy(RUN, wanted)).index == 0
                result = await waiting
                assert result is not None
                assert result.index == 0
                return clock() - started

        assert asyncio.run(scenario()) < 15, "sooner than at the end of its wait"
