"""The drivers of this replica: takes runs that nobody drives, and keeps their leases alive.

A replica that ends in good order gives its leases up; one that is killed leaves them until their
time is over, and then whichever replica looks first goes on, by the same replay as after a crash.
"""

import asyncio
import contextlib

from sqlalchemy.exc import SQLAlchemyError

from riffle.common.process.workers import in_thread
from riffle.coordinator.learning.learner import Learner
from riffle.coordinator.metrics import JOURNAL
from riffle.coordinator.runs.desk import Desk
from riffle.coordinator.runs.driver import Driver
from riffle.coordinator.store.events import STOPPED, wait
from riffle.coordinator.store.leases import Replica, RunLease

RENEWALS = 3  # within the time of a lease


class Drivers:
    """Drivers by run."""

    def __init__(self, desk: Desk, replica: Replica) -> None:
        self._desk = desk
        self._seconds = replica.lease_seconds
        self.name = replica.name
        self._driven: dict[str, tuple[Driver, asyncio.Task[None]]] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    @property
    def until(self) -> float:
        """When a lease of now ends, in seconds since 1970."""
        return self._desk.clock() + self._seconds

    async def start(self) -> None:
        """Take up every run that was left, or that nobody drives."""
        await self._seek(start=True)
        self._keeping = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Stop driving; nothing is lost, another replica or the next start takes up again."""
        self._closing.set()
        if self._keeping is not None:  # not cancelled: it may just have taken leases
            await asyncio.wait([self._keeping])
        leases = [driver.lease for driver, _ in self._driven.values()]
        for run_id in list(self._driven):
            await self.halt(run_id)
        with contextlib.suppress(SQLAlchemyError):  # then they end by themselves
            await in_thread(self._desk.store.hold, leases, 0.0)

    def drive(self, lease: RunLease, learner: Learner | None = None) -> None:
        """Drive a run; ``learner``: as it is at the run's first deployment."""
        driver = Driver(self._desk, lease, learner)
        task = asyncio.create_task(driver.run(), name=f"run {lease.run_id}")
        task.add_done_callback(lambda done: self._ended(lease.run_id, done))
        self._driven[lease.run_id] = (driver, task)

    async def halt(self, run_id: str) -> RunLease | None:
        """Stop driving a run; the lease to drive it again, if it was driven here."""
        driven = self._driven.pop(run_id, None)
        if driven is None:
            return None
        driven[1].cancel()
        await asyncio.wait([driven[1]])
        return driven[0].lease

    def trouble(self, run_id: str) -> str | None:
        """What keeps a run that is driven here from going on at the moment, if anything."""
        driven = self._driven.get(run_id)
        return driven[0].trouble if driven else None

    async def heard(self, what: str) -> None:
        """News of a replica: a driver here that waits for a batch sees that its run is stopped."""
        driven = self._driven.get(what.removeprefix(STOPPED))
        if what.startswith(STOPPED) and driven is not None and driven[0].going:
            lease = await self.halt(driven[0].lease.run_id)
            if lease is not None:
                self.drive(lease)

    # -- leases ----------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            await wait(self._closing, self._seconds / RENEWALS)
            if self._closing.is_set():
                return
            try:
                await self._renew()
                await self._seek(start=False)
            except SQLAlchemyError as error:
                JOURNAL.exception("leases-not-renewed", error)

    async def _renew(self) -> None:
        held = [driver.lease for driver, _ in self._driven.values()]
        for lease in await in_thread(self._desk.store.hold, held, self.until):
            await self.halt(lease.run_id)

    async def _seek(self, *, start: bool) -> None:
        store, now = self._desk.store, self._desk.clock()
        for lease in await in_thread(store.take, self.name, now, self.until, start=start):
            await self.halt(lease.run_id)
            self.drive(lease)

    def _ended(self, run_id: str, task: asyncio.Task[None]) -> None:
        driven = self._driven.get(run_id)
        if driven is not None and driven[1] is task:
            del self._driven[run_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            JOURNAL.exception("driver-ended", error, run_id=run_id)
