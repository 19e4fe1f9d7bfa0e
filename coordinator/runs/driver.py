"""Carries out one run: deposit, wait, fetch, open, settle, acknowledge, and again.

A driver holds no state that matters, and a lease (`coordinator.store.leases`) without which it
changes nothing. Each turn reads the run's deployments from the store and does the one step that the
first unsettled one needs; every step may be repeated:

- issued: deposit the stored bytes (the shuffler answers the same bytes alike);
- open: wait until it is sealed; past its expiry abandon it and issue it again;
- sealed: fetch (the same bytes until acknowledged), open, and settle in one transaction: spend,
  counts, stage result, next deployment, events; when the shuffler has lost it, issue it again;
- counted or rejected: acknowledge, so that the shuffler erases.

So a crash between any two lines costs at most the step it fell into. When the shuffler or the disk
does not answer, the step is tried again, later and later. Once a run was stopped or has failed, a
batch that is not sealed is abandoned; one that is sealed is settled, as its users reported already.

Of a batch's progress a driver uses its state, and the number of episodes once it is sealed or over:
the shuffler says no more, as numbers that grow are a clock of single reports.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import ParamSpec

from sqlalchemy.exc import SQLAlchemyError

from riffle.common.process.tracing import in_span
from riffle.common.process.workers import in_thread
from riffle.common.protocol.descriptor import Context, parse, sign_deposit
from riffle.common.protocol.errors import LocalError, RemoteError, RiffleError
from riffle.common.protocol.messages import BatchState, BatchStatus
from riffle.coordinator.batches import ledger
from riffle.coordinator.batches.counts import private_counts, value_estimate
from riffle.coordinator.batches.issue import Issue
from riffle.coordinator.batches.shuffler_client import Messages, state_at
from riffle.coordinator.learners.registry import refusal
from riffle.coordinator.learning.learner import Learner, LearnerError
from riffle.coordinator.metrics import JOURNAL
from riffle.coordinator.runs.desk import Desk
from riffle.coordinator.runs.laps import Laps
from riffle.coordinator.runs.replay import replay
from riffle.coordinator.specs import MANUAL
from riffle.coordinator.store.events import wait
from riffle.coordinator.store.leases import LeaseLostError, RunLease
from riffle.coordinator.store.records import DeploymentRecord, Released, RunRecord, Settlement

POLL_SECONDS = 25.0
EXPIRY_MARGIN_SECONDS = 2.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 30.0
LEAST_POLL_SECONDS = 0.05
EXPIRED = "expired or was abandoned"
CLOCKS = "the shuffler says that a new batch has expired: set its clock or this one right"
FULL: tuple[BatchState, ...] = ("sealed", "forwarded")
LOST = ("late", "unknown-batch")

P = ParamSpec("P")


class Driver:
    """Carries out one run until it is over and nothing of it is left at the shuffler."""

    def __init__(self, desk: Desk, lease: RunLease, learner: Learner | None = None) -> None:
        self._desk = desk
        self.lease = lease
        self._run_id = lease.run_id
        self.going = True  # as far as this driver has seen
        self._learner = learner  # None: replay it from the store when it is needed
        self._failures = 0
        self._storing: float | None = None
        self.trouble: str | None = None

    async def run(self) -> None:
        """Drive to the end, or until another replica does."""
        with contextlib.suppress(LeaseLostError):
            while await self._turn():
                pass

    # -- one turn --------------------------------------------------------------------------------

    async def _turn(self) -> bool:
        """Do what comes next; False when nothing ever will."""
        ticket = self._desk.bell.ticket(self._run_id)
        try:
            run, row = await in_thread(self._desk.store.next_work, self._run_id)
        except SQLAlchemyError as error:
            await self._pause(_store_trouble(error))
            return True
        self.going = run.state == "running"
        if row is not None:
            await self._attempt(run, row)
        elif self.going:
            await wait(ticket, POLL_SECONDS)  # manual mode: nothing is asked for
        else:
            return False
        return True

    async def _attempt(self, run: RunRecord, row: DeploymentRecord) -> None:
        """Do the step that ``row`` needs; wait and try again, or fail the run, when it fails."""
        try:
            await self._step(run, row)
        except RiffleError as error:
            await self._after(run, error)
        except SQLAlchemyError as error:
            await self._after(run, _store_trouble(error))
        except Exception as error:
            JOURNAL.exception("step-failed", error, run_id=self._run_id)
            await self._after(run, _unexpected(run, error))
        else:
            self._failures, self.trouble = 0, None

    async def _step(self, run: RunRecord, row: DeploymentRecord) -> None:
        going = run.state == "running"
        steps: dict[str, Callable[[RunRecord, DeploymentRecord], Awaitable[None]]] = {
            "issued": self._deposit if going else self._give_up,
            "open": self._wait if going else self._give_up,
            "sealed": self._count,
            "counted": self._acknowledge,
            "rejected": self._acknowledge,
        }
        await steps[row.state](run, row)

    async def _after(self, run: RunRecord, error: RiffleError) -> None:
        """What an error means: later again, or the end of the run."""
        if isinstance(error, LeaseLostError):
            raise error
        self._learner = None  # it may have seen counts that were not committed
        self._desk.metrics.trouble.labels(error.slug).inc()
        if error.slug == "unavailable" or run.state != "running":
            await self._pause(error)
            return
        JOURNAL.problem("run-failed", error, run_id=self._run_id)
        try:
            await in_thread(self._desk.store.fail, self.lease, error.detail, self._now)
        except SQLAlchemyError as again:
            await self._pause(_store_trouble(again))  # the same step fails again, then this
        except LocalError as again:
            if isinstance(again, LeaseLostError):
                raise
            await self._pause(again)  # stopped meanwhile: the next turn sees it
        self._desk.bell.ring(self._run_id)

    async def _pause(self, error: RiffleError) -> None:
        """Wait, longer after every failure in a row."""
        self.trouble = error.detail
        self._failures += 1
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures - 1, 30), LONGEST_PAUSE_SECONDS)
        await asyncio.sleep(max(pause, error.retry_after or 0))

    @property
    def _now(self) -> float:
        return self._desk.clock()

    async def _tell(self, change: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Commit a change of which there is an event, and wake whoever waits for one."""
        try:
            await in_thread(change, *args, **kwargs)
        finally:  # also when this driver is stopped meanwhile: the change is made
            self._desk.bell.ring(self._run_id)

    # -- issued ----------------------------------------------------------------------------------

    async def _deposit(self, run: RunRecord, row: DeploymentRecord) -> None:
        try:
            self._desk.analyzer.check_key(parse(row.data))
        except LocalError:  # a key was rotated between issue and deposit; nobody has seen this one
            await self._again(run, row, 0, "was issued under a key that is gone")
            return
        signature = sign_deposit(self._desk.signing_key, row.data)
        try:
            await self._desk.shuffler.deposit(row.batch_id, row.data, signature)
        except RemoteError as error:
            if error.slug != "late":
                raise
            left = row.descriptor.expires_at - self._now
            if left > 0:  # issued anew it would be late as well, and soon out of tries
                raise LocalError("unavailable", f"{CLOCKS} ({left:.0f} s left by ours)") from error
            await self._again(run, row, 0, EXPIRED)
            return
        await in_thread(self._desk.store.opened, self.lease, row.index, self._now)

    # -- open ------------------------------------------------------------------------------------

    async def _wait(self, run: RunRecord, row: DeploymentRecord) -> None:
        started, expires_at = time.perf_counter(), row.descriptor.expires_at
        left = expires_at + EXPIRY_MARGIN_SECONDS - self._now
        status = await self._desk.shuffler.status(row.batch_id, max(0.0, min(left, POLL_SECONDS)))
        if status.state in FULL:
            await self._full(run, row, status)
        elif status.state == "abandoned":
            await self._again(run, row, status.episodes or 0, EXPIRED)
        elif status.state != "open":
            raise LocalError(
                "wrong-state",
                f"batch {row.batch_id} is {status.state} at the shuffler but not counted here: is "
                "this an older copy of the store?",
            )
        elif left <= 0:
            await self._abandon(row)
        elif time.perf_counter() - started < LEAST_POLL_SECONDS:
            await asyncio.sleep(LEAST_POLL_SECONDS)

    async def _full(self, run: RunRecord, row: DeploymentRecord, status: BatchStatus) -> None:
        """All n users reported."""
        timings = {"waiting": self._now - (row.opened_at or row.issued_at)}
        sealed, episodes = self._desk.store.sealed, status.episodes or row.n
        await self._tell(sealed, self.lease, row.index, episodes, timings, self._now)

    async def _abandon(self, row: DeploymentRecord) -> None:
        """Give up the batch if it is short; the shuffler keeps a full one, see its status then."""
        try:
            await self._desk.shuffler.abandon(row.batch_id)
        except RemoteError as error:
            if error.slug not in ("wrong-state", "unknown-batch"):
                raise

    async def _again(self, run: RunRecord, row: DeploymentRecord, episodes: int, why: str) -> None:
        """The batch did not come about: issue its deployment again, or fail the run.

        The learner planned for n reports, so it is issued again whole even where the episodes that
        were executed for nothing then add up to more than K; `RunSpec.reissues` says so.
        """
        again, failure = None, None
        if run.state == "running":
            again, failure = await in_thread(self._reissue, run, row, why)
        await self._end(row, episodes, again, failure)

    async def _end(
        self,
        row: DeploymentRecord,
        episodes: int,
        again: Issue | None = None,
        failure: str | None = None,
    ) -> None:
        """The batch will not be counted; see `Store.abandoned`."""
        desk, now = self._desk, self._now
        abandoned = partial(desk.store.abandoned, again=again, failure=failure)
        await self._tell(desk.over, partial(abandoned, self.lease, row.index, episodes, now))

    def _reissue(
        self, run: RunRecord, row: DeploymentRecord, why: str
    ) -> tuple[Issue | None, str | None]:
        rows = self._desk.store.deployments(run.id)
        tries = sum(other.step == row.step for other in rows)
        if tries <= run.spec.reissues:
            index = len(rows)
            again = self._desk.issue(run.id, run.spec, row.deployment, index=index, step=row.step)
            return again, None
        return None, (
            f"deployment {row.index} (n={row.n}) {why}, and so did every one of its {tries} tries; "
            "check that enough nodes serve users who have not reported yet"
        )

    async def _give_up(self, run: RunRecord, row: DeploymentRecord) -> None:
        """The run is over: the batch is not needed. A full one is settled all the same."""
        await self._abandon(row)
        status = None
        with contextlib.suppress(RemoteError):  # it was never deposited
            status = await self._desk.shuffler.status(row.batch_id, 0.0)
        if status is None or status.state not in FULL:
            episodes = 0 if status is None else status.episodes or 0
            await self._end(row, episodes)
        elif row.state == "issued":
            await in_thread(self._desk.store.opened, self.lease, row.index, self._now)
        else:
            await self._full(run, row, status)

    # -- sealed ----------------------------------------------------------------------------------

    async def _count(self, run: RunRecord, row: DeploymentRecord) -> None:
        """Fetch, open, settle. Until `settle` has committed, everything can be done again."""
        context, timings = parse(row.data), dict(row.timings)
        released = await self._released(run, row, context, timings)
        if released is None:
            # Also what a coordinator on an older copy of its store meets when the batch was counted
            # before: that spend is in the newer copy only, and its users cannot report again.
            await self._again(run, row, row.episodes_executed, "was lost by the shuffler")
            return
        laps = Laps()
        spend = await in_thread(ledger.spent, context.descriptor, released.failed)
        opened = Settlement(row.index, spend, released, timings)
        settlement = await in_thread(self._settlement, run, row, opened)
        timings["planning"] = laps.lap()
        await self._tell(self._desk.store.settle, self.lease, settlement, self._now)
        self._storing = laps.lap()

    async def _released(
        self, run: RunRecord, row: DeploymentRecord, context: Context, timings: dict[str, float]
    ) -> Released | None:
        """The batch's counts with their noise; None when the shuffler has lost it.

        Noise of the coordinator's own is committed before anything looks at it, and what is
        committed is used from then on: see `Store.release`.
        """
        store, central = self._desk.store, context.descriptor.trust == "central"
        if central and (kept := await in_thread(store.released, run.id, row.index)):
            return kept
        laps = Laps()
        messages = await self._fetched(row.batch_id, context)
        if messages is None:
            return None
        timings["fetching"] = laps.lap()
        opening = await self._desk.analyzer.open(context, messages.data)
        timings["opening"] = laps.lap()
        found = Released(opening.histogram, opening.opened, opening.failed, messages.sha256)
        return await in_thread(store.release, self.lease, row.index, found) if central else found

    async def _fetched(self, batch_id: str, context: Context) -> Messages | None:
        """The batch's messages; None when the shuffler has lost them."""
        descriptor, shuffler = context.descriptor, self._desk.shuffler
        size = descriptor.n * descriptor.padding.messages * descriptor.message_bytes
        try:
            self._desk.analyzer.check_key(context)
        except LocalError:
            # What cannot be opened is not fetched again and again, only watched.
            if await state_at(shuffler, batch_id) in FULL:
                raise
            return None
        try:
            return await shuffler.messages(batch_id, size)
        except RemoteError as error:
            if error.slug not in LOST:
                raise
            return None

    @in_span("plan")
    def _settlement(self, run: RunRecord, row: DeploymentRecord, opened: Settlement) -> Settlement:
        """What the batch changes beyond its spend: nothing more, once the run is over."""
        if run.state != "running":
            return opened
        if not opened.spend.within_promise:
            why = f"had {opened.spend.dishonest} dishonest reports or more"
            again, failure = self._reissue(run, row, why)
            return replace(opened, following=again, failure=failure)
        learner = self._rebuilt(run)
        counts = private_counts(row.descriptor, opened.released.histogram)
        stage, estimate = learner.observe(counts), value_estimate(counts, run.spec.delta)
        summary, deployment = learner.summary(), learner.next_deployment()
        following = None
        if deployment is not None:
            index, step = row.index + 1, row.step + 1
            following = self._desk.issue(run.id, run.spec, deployment, index=index, step=step)
        over = deployment is None and (run.spec.learner != MANUAL or self._used_up(run))
        return replace(
            opened,
            stage=stage,
            summary=summary,
            following=following,
            finished=over,
            estimate=estimate,
        )

    def _used_up(self, run: RunRecord) -> bool:
        """Whether K episodes were executed, in manual mode the end."""
        rows = self._desk.store.deployments(run.id)
        return sum(row.executed for row in rows) >= run.spec.episodes

    def _rebuilt(self, run: RunRecord) -> Learner:
        """The learner as the store left it; in manual mode it is told anew what was asked for."""
        if self._learner is None or run.spec.learner == MANUAL:
            store = self._desk.store
            learner = self._desk.registry.build(run.spec)
            replay(learner, store.deployments(run.id), store.histograms(run.id))
            self._learner = learner
        return self._learner

    # -- counted, rejected -----------------------------------------------------------------------

    async def _acknowledge(self, run: RunRecord, row: DeploymentRecord) -> None:
        laps, timings = Laps(), dict(row.timings)
        try:
            await self._desk.shuffler.acknowledge(row.batch_id, row.messages_sha256 or "")
        except RemoteError as error:
            # The counts are safe here; a shuffler that has nothing to erase must not end the run.
            JOURNAL.problem("not-acknowledged", error, run_id=run.id, deployment=row.index)
        if self._storing is not None:
            timings["storing"] = self._storing
        timings["acknowledging"], self._storing = laps.lap(), None
        acknowledged = self._desk.store.acknowledged
        await in_thread(self._desk.over, partial(acknowledged, self.lease, row.index, timings))
        self._desk.metrics.took(timings)


def _store_trouble(error: SQLAlchemyError) -> LocalError:
    return LocalError("unavailable", f"the store cannot be used: {str(error).splitlines()[0]}")


def _unexpected(run: RunRecord, error: Exception) -> RiffleError:
    """What a run fails with: the words of a learner that cannot go on, else where to look."""
    if isinstance(error, LearnerError):
        return refusal(run.spec, error)
    return LocalError("internal", f"unexpected {type(error).__name__}; see the log")
