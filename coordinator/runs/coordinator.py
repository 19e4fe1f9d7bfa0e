"""All runs of one store: drivers for the runs that this replica leases, and methods for routes."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError

from riffle.common.mechanism.parameters import Aggregation
from riffle.common.process.workers import in_thread
from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.coordinator.batches.issue import Issue, Issuer, same_deployment
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.learners.registry import Registry, batches, refusal
from riffle.coordinator.learning.learner import Deployment, Learner, LearnerError
from riffle.coordinator.metrics import JOURNAL, CoordinatorMetrics
from riffle.coordinator.runs.driver import Driver
from riffle.coordinator.runs.exchange import BatchExchange
from riffle.coordinator.runs.learner import RunLearner
from riffle.coordinator.specs import MANUAL, ManualDeployment, RunSpec
from riffle.coordinator.store.events import STOPPED, ChangeSignals, wait
from riffle.coordinator.store.records import DeploymentRecord, Replica, RunLease
from riffle.coordinator.store.transactions import Store

LONGEST_WAIT_SECONDS = 30.0
RETRY_SECONDS = 5.0
RENEWALS = 3
"""A lease is renewed this many times in the time for which it lasts."""


@dataclass
class Drivers:
    """This replica's drivers, one for each run that it drives. Takes and renews leases of runs.

    A replica that stops normally releases its leases. If a replica is killed, its leases expire,
    and another replica takes over the runs. ``make_driver`` makes the driver for a lease. Its
    second argument is None, or the learner that has just planned the run's first deployment.
    """

    store: Store
    make_driver: Callable[[RunLease, Learner | None], Driver]
    replica: Replica
    clock: Callable[[], float]
    driven: dict[str, tuple[Driver, asyncio.Task[None]]] = field(default_factory=dict, init=False)
    _renewing: asyncio.Task[None] | None = field(default=None, init=False)
    _closing: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def until(self) -> float:
        """The time at which a lease granted now ends, in seconds since 1970."""
        return self.clock() + self.replica.lease_seconds

    async def start(self) -> None:
        """Drives every run that this replica drove before, or that nobody drives."""
        await self._take_runs(start=True)
        self._renewing = asyncio.create_task(self._renew_until_closed())

    async def close(self) -> None:
        """Stops driving. The runs go to another replica, or to this replica when it restarts."""
        self._closing.set()
        if self._renewing is not None:  # not cancelled: it may just have taken leases
            await asyncio.wait([self._renewing])
        leases = [driver.lease for driver, _ in self.driven.values()]
        for run_id in list(self.driven):
            await self.halt(run_id)
        with contextlib.suppress(SQLAlchemyError):  # the leases then expire by themselves
            await in_thread(self.store.renew_leases, leases, 0.0)

    def drive(self, lease: RunLease, learner: Learner | None = None) -> None:
        """Starts driving a run. ``learner`` is the second argument of ``make_driver``."""
        driver = self.make_driver(lease, learner)
        task = asyncio.create_task(driver.run(), name=f"run {lease.run_id}")
        task.add_done_callback(lambda done: self._remove(lease.run_id, done))
        self.driven[lease.run_id] = (driver, task)

    async def halt(self, run_id: str) -> RunLease | None:
        """Stops driving a run; returns its lease, or None if it was not driven here."""
        driven = self.driven.pop(run_id, None)
        if driven is None:
            return None
        driven[1].cancel()
        await asyncio.wait([driven[1]])
        return driven[0].lease

    async def restart(self, run_id: str) -> None:
        """Restarts a run's driver to end its long poll, after another replica stopped the run."""
        driven = self.driven.get(run_id)
        if driven is not None and driven[0].running and (lease := await self.halt(run_id)):
            self.drive(lease)

    def trouble(self, run_id: str) -> str | None:
        """Returns why a run that is driven here cannot go on now, or None."""
        driven = self.driven.get(run_id)
        return driven[0].trouble if driven else None

    async def _renew_until_closed(self) -> None:
        while True:
            await wait(self._closing, self.replica.lease_seconds / RENEWALS)
            if self._closing.is_set():
                return
            try:
                leases = [driver.lease for driver, _ in self.driven.values()]
                for lost in await in_thread(self.store.renew_leases, leases, self.until):
                    await self.halt(lost.run_id)
                await self._take_runs(start=False)
            except SQLAlchemyError as error:
                JOURNAL.exception("leases-not-renewed", error)

    async def _take_runs(self, *, start: bool) -> None:
        take, now, until = self.store.take_leases, self.clock(), self.until
        leases = await in_thread(take, self.replica.name, now, until, start=start)
        if start:
            JOURNAL.note("started", runs=len(leases))
        for lease in leases:
            await self.halt(lease.run_id)
            JOURNAL.note("run-taken-over", run_id=lease.run_id)
            self.drive(lease)

    def _remove(self, run_id: str, task: asyncio.Task[None]) -> None:
        driven = self.driven.get(run_id)
        if driven is not None and driven[1] is task:
            del self.driven[run_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            JOURNAL.exception("driver-ended", error, run_id=run_id)


@dataclass
class Coordinator:
    """All runs of one store. Make and close it inside a running event loop.

    ``clock`` returns seconds since 1970. With ``test_entry``, runs may be seeded.
    """

    store: Store
    issuer: Issuer
    exchange: BatchExchange
    keys: KeyRing
    registry: Registry
    signals: ChangeSignals
    metrics: CoordinatorMetrics
    clock: Callable[[], float]
    replica: Replica
    test_entry: bool
    aggregations: tuple[Aggregation, ...]
    stall_seconds: float = 15.0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _restarts: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.drivers = Drivers(self.store, self._make_driver, self.replica, self.clock)

    def _make_driver(self, lease: RunLease, learner: Learner | None) -> Driver:
        return Driver(
            lease,
            RunLearner(self.store, self.registry, self.issuer, learner),
            self.store,
            self.exchange,
            self.keys,
            self.signals,
            self.metrics,
            self.clock,
            self.stall_seconds,
        )

    async def start(self) -> None:
        """Resumes all runs that no other replica drives."""
        await in_thread(self.keys.erase_unused, self.store.keys_in_use)
        for work in (self.store.listen(self._notified), self._abandon_unknown()):
            self._tasks.append(asyncio.create_task(work))
        await self.drivers.start()

    async def close(self) -> None:
        """Stops driving runs, so that nothing here uses the store any more."""
        for task in self._tasks:
            task.cancel()
        # A restart that is still under way would start a driver that nobody halts.
        if ending := {*self._tasks, *self._restarts}:
            await asyncio.wait(ending)
        await self.drivers.close()

    async def create(self, spec: RunSpec) -> str:
        """Creates a run with its first deployment and starts driving it; returns its id.

        Raises RemoteError ``invalid-spec``, ``test-entry-refused``, ``trust-refused`` (because of
        the aggregation) or ``batch-too-small``. Raises RemoteError ``wrong-state`` if a run with
        another spec has this id.
        """
        if spec.test_seed is not None and not self.test_entry:
            raise RemoteError("test-entry-refused", "this coordinator takes no test_seed")
        if spec.aggregation not in self.aggregations:
            detail = f"this coordinator takes no run with aggregation {spec.aggregation!r}"
            raise RemoteError("trust-refused", f"{detail}; see its setting AGGREGATIONS")
        run_id = spec.run_id or secrets.token_hex(16)
        learner, first = await in_thread(self._issue_first, run_id, spec)
        now, holder, until = self.clock(), self.replica.name, self.drivers.until
        lease = await in_thread(self.store.create_run, run_id, spec, first, now, holder, until)
        if lease is not None:
            JOURNAL.note("run-created", run_id=run_id)
            self.drivers.drive(lease, learner)
            self.signals.fire(run_id)
        return run_id

    def _issue_first(self, run_id: str, spec: RunSpec) -> tuple[Learner, Issue | None]:
        learner = self.registry.build(spec)
        for n, layer in batches(learner):
            self.issuer.check(spec, n, layer)
        try:
            deployment = learner.next_deployment()
        except LearnerError as error:
            JOURNAL.exception("learner-failed", error, run_id=run_id)
            raise refusal(spec, error) from error
        if deployment is None:
            return learner, None
        return learner, self.issuer.issue(run_id, spec, deployment, index=0, step=0)

    async def stop(self, run_id: str) -> None:
        """Stops a run; its open batch is abandoned. Stopping a stopped run changes nothing.

        Raises RemoteError ``unknown-run``, or ``wrong-state`` if the run finished or failed.
        """
        run = await in_thread(self.store.run, run_id)
        if run.state == "stopped":
            return
        if run.state != "running":
            raise RemoteError("wrong-state", f"run {run_id} is {run.state}")
        lease = await self.drivers.halt(run_id)
        try:
            await in_thread(self.store.stop, run_id, self.clock())
        except LocalError as error:
            raise RemoteError(error.slug, "the run ended meanwhile") from error
        finally:
            if lease is not None:
                self.drivers.drive(lease)
            self.signals.fire(run_id)

    async def deploy(self, run_id: str, wanted: ManualDeployment) -> DeploymentRecord:
        """Issues a manual deployment.

        Raises RemoteError ``unknown-run``, ``invalid-spec``, ``batch-too-small``, ``wrong-state``.
        """
        row = await in_thread(self._issue_manual, run_id, wanted)
        self.signals.fire(run_id)
        return row

    def _issue_manual(self, run_id: str, wanted: ManualDeployment) -> DeploymentRecord:
        run, rows = self.store.run(run_id), self.store.deployments(run_id)
        if run.spec.learner != MANUAL:
            raise RemoteError("wrong-state", f"run {run_id} is driven by {run.spec.learner}")
        if wanted.layer is not None and wanted.layer >= run.spec.horizon:
            raise RemoteError("invalid-spec", f"layer: must be below {run.spec.horizon}")
        next_step = rows[-1].step + 1 if rows else 0
        step = next_step if wanted.step is None else wanted.step
        mixture = wanted.mixture(run.spec.sizes)
        deployment = Deployment(step, "manual", mixture, wanted.episodes, wanted.layer)
        if step != next_step:
            return _earlier(rows, deployment)
        issue = self.issuer.issue(run_id, run.spec, deployment, index=len(rows), step=step)
        return self.store.issue_manual(run_id, issue, self.clock())

    async def newest_deployment(
        self, run_id: str, known: int | None, seconds: float
    ) -> DeploymentRecord | None:
        """Returns the newest deployment, if any. Waits up to ``seconds`` for a new one.

        ``known`` is the index of the deployment that the caller has. Raises RemoteError
        ``unknown-run``.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + min(seconds, LONGEST_WAIT_SECONDS)
        await in_thread(self.store.run, run_id)  # an unknown run's signal would be kept for ever
        while True:
            signal = self.signals.signal(run_id)
            run = await in_thread(self.store.run, run_id)
            newest = await in_thread(self.store.newest, run_id)
            left = deadline - clock()
            changed = newest is not None and newest.index != known
            over = run.state != "running" or self.signals.closed
            if changed or left <= 0 or over:
                return newest
            await wait(signal, min(left, self.signals.recheck_seconds))

    async def _abandon_unknown(self) -> None:
        """Abandons the shuffler's open batches that this store does not have.

        Nobody would count these batches, so no user should spend a report on them. Every replica
        stores a batch before it deposits the batch, and the shuffler's list is read before the
        store. So a store lacks a batch of the list only if it was restored from an older copy.
        """
        while True:
            try:
                open_batches = await self.exchange.shuffler.open_batches()
                known = await in_thread(self.store.batch_ids)
                for batch_id in sorted(set(open_batches) - known):
                    with contextlib.suppress(RemoteError):  # it became full or ended
                        await self.exchange.shuffler.abandon(batch_id)
                        JOURNAL.note("unknown-batch-abandoned", logging.WARNING, batch_id=batch_id)
            except (RiffleError, SQLAlchemyError):
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    def _notified(self, payload: str) -> None:
        """Handles a notification: a run's id, perhaps with prefix STOPPED, or "" for any run."""
        if not payload:
            self.signals.fire_all()
            return
        run_id = payload.removeprefix(STOPPED)
        self.signals.fire(run_id)
        if payload.startswith(STOPPED):
            task = asyncio.create_task(self.drivers.restart(run_id), name=f"restart {run_id}")
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)


def _earlier(rows: list[DeploymentRecord], wanted: Deployment) -> DeploymentRecord:
    """Returns the deployment that an earlier request for the same step issued."""
    for row in reversed(rows):
        if row.step == wanted.stage and same_deployment(row.deployment, wanted):
            return row
    raise RemoteError(
        "wrong-state", f"step {wanted.stage} is not the next, or was another deployment"
    )
