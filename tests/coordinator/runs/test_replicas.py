"""Leases of runs and their fences; two coordinators on one store, one of which is killed."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.runs.drivers import Drivers
from riffle.coordinator.specs import ManualDeployment
from riffle.coordinator.store.events import STOPPED, Bell
from riffle.coordinator.store.leases import LeaseLostError, Replica, RunLease
from riffle.coordinator.store.store import Store
from tests.coordinator.conftest import both_engines
from tests.coordinator.faults import outcome
from tests.coordinator.store.test_store import MANUAL, issued, settlement, to_sealed
from tests.coordinator.world import (
    NOW,
    RUN,
    FakeShuffler,
    desk,
    drivers_end,
    spec,
    store_url,
    tasks_of_drivers,
    until,
)

pytestmark = both_engines
FIRST, SECOND = RunLease(RUN, 1), RunLease(RUN, 2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(store_url(tmp_path))
    assert opened.create_run(RUN, MANUAL, issued(0), NOW, "first", NOW + 15) == FIRST
    yield opened
    opened.close()


def take(store: Store, holder: str, now: float, *, start: bool = False) -> list[RunLease]:
    return store.take(holder, now, now + 15, start=start)


# -- leases -------------------------------------------------------------------------------------


def test_a_run_is_driven_by_one_until_its_time_is_over(store: Store) -> None:
    assert take(store, "second", NOW + 14) == []
    assert take(store, "second", NOW + 15) == [SECOND]
    assert take(store, "third", NOW + 15) == []
    assert take(store, "first", NOW + 30) == [RunLease(RUN, 3)]


def test_a_lease_that_is_held_lasts_longer_and_one_given_up_ends(store: Store) -> None:
    assert store.hold([FIRST], NOW + 100) == []
    assert take(store, "second", NOW + 99) == []
    assert store.hold([FIRST], 0.0) == []
    assert take(store, "second", NOW) == [SECOND]
    assert store.hold([FIRST], NOW + 100) == [FIRST], "it was lost"
    assert take(store, "third", NOW + 14) == []


def test_a_restart_takes_what_its_predecessor_held(store: Store, engine: str) -> None:
    assert take(store, "second", NOW, start=True) == ([] if engine == "postgresql" else [SECOND])
    mine = take(store, "first", NOW, start=True)
    assert [lease.run_id for lease in mine] == [RUN]


def test_a_run_without_work_is_not_taken(store: Store) -> None:
    to_sealed(store)
    store.settle(FIRST, settlement(finished=True), NOW)
    store.acknowledged(FIRST, 0, {})
    assert take(store, "second", NOW + 100) == []


LATE: list[tuple[str, Callable[[Store], None]]] = [
    ("opened", lambda store: store.opened(FIRST, 0, NOW)),
    ("sealed", lambda store: store.sealed(FIRST, 0, 20, {}, NOW)),
    ("settle", lambda store: store.settle(FIRST, settlement(), NOW)),
    ("abandoned", lambda store: store.abandoned(FIRST, 0, 20, NOW)),
    ("acknowledged", lambda store: store.acknowledged(FIRST, 0, {})),
    ("fail", lambda store: store.fail(FIRST, "late", NOW)),
]


@pytest.mark.parametrize(("step", "act"), LATE, ids=[step for step, _ in LATE])
def test_who_lost_the_lease_changes_nothing(
    store: Store, step: str, act: Callable[[Store], None]
) -> None:
    """In whatever state the run is, so it is the fence that refuses, not the state."""
    advance: dict[str, Callable[[], None]] = {
        "sealed": lambda: store.opened(FIRST, 0, NOW),
        "settle": lambda: to_sealed(store),
        "acknowledged": lambda: to_sealed(store),
    }
    advance.get(step, lambda: None)()
    assert take(store, "second", NOW + 15) == [SECOND]
    before = (store.run(RUN), store.deployments(RUN), store.events(RUN), store.ledger(RUN))
    with pytest.raises(LeaseLostError, match="another replica"):
        act(store)
    assert (store.run(RUN), store.deployments(RUN), store.events(RUN), store.ledger(RUN)) == before


# -- two coordinators -----------------------------------------------------------------------------


class Listener(Bell):
    """Knows whether its coordinator hears of news: at first it is told that some may be missed."""

    hears = False

    def ring_all(self) -> None:
        self.hears = True
        super().ring_all()


@asynccontextmanager
async def replica(directory: Path, shuffler: Any, name: str) -> AsyncIterator[Coordinator]:
    at = replace(desk(directory, shuffler), bell=Listener())
    coordinator = Coordinator(at, test_entry=True, replica=Replica(name, 0.3))
    await coordinator.start()
    try:
        async with asyncio.timeout(30):
            yield coordinator
    finally:
        await coordinator.close()
        at.analyzer.close()
        at.store.close()


def driven(coordinator: Coordinator) -> bool:
    return RUN in coordinator._drivers._driven


def is_free(directory: Path) -> bool:
    """Whether another replica can take the run at once."""
    store = Store(store_url(directory))
    try:
        return bool(take(store, "two", NOW))
    finally:
        store.close()


def test_news_of_a_stop_starts_no_driver_after_the_end(tmp_path: Path) -> None:
    """The replica ends while the driver that it starts anew still ends."""

    class Slow(FakeShuffler):
        async def status(self, batch_id: str, wait: float) -> Any:
            try:
                return await super().status(batch_id, wait)
            finally:
                await asyncio.sleep(0.05)

    shuffler = Slow()
    shuffler.fills = False

    async def scenario() -> None:
        async with replica(tmp_path, shuffler, "one") as one:
            await one.create(spec())
            await until(lambda: "status" in shuffler.calls)
            one._heard(STOPPED + RUN)
            await asyncio.sleep(0)
        assert tasks_of_drivers() == set()

    asyncio.run(scenario())
    assert is_free(tmp_path)


def test_a_run_that_is_taken_at_the_end_is_given_up(tmp_path: Path) -> None:
    """The replica ends while its look for runs that nobody drives finds one."""
    found = threading.Event()

    async def scenario() -> None:
        async with replica(tmp_path, FakeShuffler(), "one") as one:
            take = one.desk.store.take

            def slowly(*args: Any, **kwargs: Any) -> list[RunLease]:
                taken = take(*args, **kwargs)
                if taken:
                    found.set()
                    time.sleep(0.2)
                return taken

            one.desk.store.take = slowly  # type: ignore[method-assign]
            killed = Store(store_url(tmp_path))
            killed.create_run(RUN, MANUAL, issued(0), NOW, "killed", NOW)
            killed.close()
            await until(found.is_set)

    asyncio.run(scenario())
    assert is_free(tmp_path)


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
class TestTwo:
    """SQLite's store is one coordinator's."""

    def test_a_run_goes_on_elsewhere_when_its_coordinator_ends(
        self, tmp_path: Path, undisturbed: dict[str, Any]
    ) -> None:
        shuffler = FakeShuffler()
        shuffler.fills = False

        async def scenario() -> None:
            async with replica(tmp_path, shuffler, "two") as two:
                async with replica(tmp_path, shuffler, "one") as one:
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
            async with replica(tmp_path, shuffler, "one") as one:
                asleep, wake = asyncio.Event(), asyncio.Event()
                opener = one.desk.analyzer.open

                async def open_late(*args: Any) -> Any:
                    opening = await opener(*args)
                    asleep.set()
                    await wake.wait()
                    return opening

                async def no_renewal(_: Drivers) -> None:
                    await asyncio.sleep(3600)

                monkeypatch.setattr(one.desk.analyzer, "open", open_late)
                one._drivers._keeping.cancel()  # type: ignore[union-attr]
                await one.create(spec())
                await asleep.wait()
                sleeper = one._drivers._driven[RUN][1]
                async with replica(tmp_path, shuffler, "two") as two:
                    two.desk.clock.now += 15  # type: ignore[attr-defined]
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
            async with (
                replica(tmp_path, shuffler, "one") as one,
                replica(tmp_path, shuffler, "two") as two,
            ):
                await one.create(spec())
                bell = one.desk.bell
                await until(lambda: isinstance(bell, Listener) and bell.hears)
                await until(lambda: "wait" in shuffler.calls)
                await two.stop(RUN)
                assert two.desk.store.run(RUN).state == "stopped"
                await until(lambda: not two.desk.store.with_work())

        asyncio.run(scenario())

    def test_who_waits_at_one_hears_of_a_deployment_through_the_other(self, tmp_path: Path) -> None:
        async def scenario() -> float:
            async with (
                replica(tmp_path, FakeShuffler(), "one") as one,
                replica(tmp_path, FakeShuffler(), "two") as two,
            ):
                await one.create(spec(learner="manual"))
                waiting = asyncio.create_task(one.current(RUN, None, 20))
                await asyncio.sleep(0.2)
                clock = asyncio.get_running_loop().time
                started = clock()
                wanted = ManualDeployment(policy=((0, 0), (0, 0)), episodes=20, layer=0)
                assert (await two.deploy(RUN, wanted)).index == 0
                found = await waiting
                assert found is not None
                assert found.index == 0
                return clock() - started

        assert asyncio.run(scenario()) < 15, "sooner than at the end of its wait"
