"""Carries out one run: for each batch, deposit, wait, fetch, open, settle, acknowledge.

`coordinator.runs` lists the steps. A driver holds no state that must survive a crash. A driver
changes something only while it has the run's lease (`coordinator.store.transactions`).

If the shuffler or the disk does not answer, the driver tries the step again, after ever longer
pauses. If a run was stopped or has failed, its driver abandons a batch that is not sealed. The
driver still settles a sealed batch, because its users have already reported.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import ParamSpec

from sqlalchemy.exc import SQLAlchemyError

from riffle.common.process.workers import in_thread
from riffle.common.protocol.descriptor import Context, parse
from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.common.protocol.wire import BatchStatus, DeclineReason
from riffle.coordinator.batches import ledger
from riffle.coordinator.batches.analyzer import OpenedBatch
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.learners.registry import refusal
from riffle.coordinator.learning.learner import LearnerError
from riffle.coordinator.metrics import JOURNAL, CoordinatorMetrics
from riffle.coordinator.runs.exchange import (
    FULL,
    BatchExchange,
    BatchGoneError,
    Timings,
    log,
    timed,
)
from riffle.coordinator.runs.learner import RunLearner
from riffle.coordinator.store.events import ChangeSignals, wait
from riffle.coordinator.store.records import (
    DeploymentRecord,
    LeaseLostError,
    NextStep,
    RunLease,
    RunRecord,
    Settlement,
)
from riffle.coordinator.store.transactions import Store, store_error

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 30.0

POLL_SECONDS = 25.0
DECLINED: dict[DeclineReason, str] = {
    "no-users": "nodes have no users left whom they may ask",
    "over-limit": "people would pass the lifetime limit that their nodes' owners set",
    "too-slow": "nodes are too slow to report before their leases end",
}

P = ParamSpec("P")
Step = Callable[[RunRecord, DeploymentRecord], Awaitable[str | None]]


@dataclass
class Driver:
    """Carries out one run until the run is over and the shuffler has erased its batches.

    ``clock`` returns seconds since 1970. If a batch makes no visible progress for
    ``stall_seconds``, the run's trouble says so. ``running`` says whether the run was running at
    this driver's last turn. ``trouble`` says why the run could not go on then.
    """

    lease: RunLease
    learner: RunLearner
    store: Store
    exchange: BatchExchange
    keys: KeyRing
    signals: ChangeSignals
    metrics: CoordinatorMetrics
    clock: Callable[[], float]
    stall_seconds: float
    running: bool = field(default=True, init=False)
    trouble: str | None = field(default=None, init=False)
    _progress: tuple[tuple[int, int | None], float] = field(default=((-1, None), 0.0), init=False)
    _failures: int = field(default=0, init=False)
    _storing: dict[str, float] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Drives the run to its end, or until another replica drives it."""
        with contextlib.suppress(LeaseLostError):
            while await self._turn():
                pass

    async def _turn(self) -> bool:
        """Does the next step. Returns False once the run will need no further step."""
        signal = self.signals.signal(self.lease.run_id)
        try:
            run, row = await in_thread(self.store.next_work, self.lease.run_id)
        except SQLAlchemyError as error:
            await self._pause(None, store_error(error))
            return True
        self.running = run.state == "running"
        if row is not None:
            await self._attempt(run, row)
        elif self.running:
            await wait(signal, POLL_SECONDS)  # manual mode: no deployment is under way
        else:
            level = logging.WARNING if run.state == "failed" else logging.INFO
            JOURNAL.note(f"run-{run.state}", level, run_id=run.id, detail=run.message)
            return False
        return True

    def _step(self, run: RunRecord, row: DeploymentRecord) -> Step:
        running = run.state == "running"
        steps: dict[str, Step] = {
            "issued": self._deposit if running else self._withdraw,
            "open": self._wait if running else self._withdraw,
            "sealed": self._count,
            "counted": self._acknowledge,
            "rejected": self._acknowledge,
        }
        return steps[row.state]

    # -- failures --------------------------------------------------------------------------------

    async def _attempt(self, run: RunRecord, row: DeploymentRecord) -> None:
        """Does the step that ``row`` needs. If it fails, waits for a new try or fails the run."""
        try:
            try:
                trouble = await self._step(run, row)(run, row)
            except BatchGoneError as gone:
                trouble = None
                step = await in_thread(self.learner.reissue, run, row, gone.reason)
                await self._abandon(row, gone.episodes, step, gone.reason)
        except RiffleError as error:
            await self._recover(run, error)
        except SQLAlchemyError as error:
            await self._recover(run, store_error(error))
        except Exception as error:
            JOURNAL.exception("step-failed", error, run_id=self.lease.run_id)
            await self._recover(run, _reported(run, error))
        else:
            self._failures = 0
            await self._explain(run, trouble or "")

    async def _recover(self, run: RunRecord, error: RiffleError) -> None:
        """Fails the run. If the error is temporary or the run is over, waits for the next try."""
        if isinstance(error, LeaseLostError):
            raise error
        self.learner.forget()
        self.metrics.trouble.labels(error.slug).inc()
        if error.slug == "unavailable" or run.state != "running":
            await self._pause(run, error)
            return
        try:
            await in_thread(self.store.fail, self.lease, error.detail, self.clock())
        except SQLAlchemyError as second:
            await self._pause(run, store_error(second))  # a later turn fails the run
        except LeaseLostError:
            raise
        except LocalError as second:
            await self._pause(run, second)  # stopped meanwhile: the next turn sees it
        self.signals.fire(self.lease.run_id)

    async def _pause(self, run: RunRecord | None, error: RiffleError) -> None:
        """Waits. Every further failure in a row makes the wait longer."""
        if run is None:
            self.trouble = error.detail
        else:
            await self._explain(run, error.detail)
        self._failures += 1
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures - 1, 30), LONGEST_PAUSE_SECONDS)
        await asyncio.sleep(max(pause, error.retry_after or 0))

    async def _explain(self, run: RunRecord, trouble: str) -> None:
        """Sets the run's trouble ("" if the run can go on). Logs and stores a changed trouble."""
        before = run.trouble if self.trouble is None else self.trouble
        self.trouble = trouble
        if trouble == before or run.state != "running":
            return
        event, level = ("run-waits", logging.WARNING) if trouble else ("run-goes-on", logging.INFO)
        JOURNAL.note(event, level, run_id=run.id, detail=trouble)
        with contextlib.suppress(SQLAlchemyError):  # then only this replica shows the trouble
            await in_thread(self.store.record_trouble, self.lease, trouble)

    # -- issued, open ----------------------------------------------------------------------------

    async def _deposit(self, _: RunRecord, row: DeploymentRecord) -> None:
        await self.exchange.deposit(row)
        await in_thread(self.store.record_deposit, self.lease, row.index, self.clock())
        log("deposited", row, n=row.n)

    async def _wait(self, _: RunRecord, row: DeploymentRecord) -> str | None:
        began = self.clock()
        status = await self.exchange.wait_until_full(row)
        if status.state in FULL:
            await self._seal(row, status)
            return None
        if status.declined:
            reasons = "; ".join(DECLINED[reason] for reason in status.declined)
            return f"batch {row.index} waits for reports: {reasons}"
        return await self._stalled(row, began)

    async def _stalled(self, row: DeploymentRecord, began: float) -> str | None:
        """Returns the trouble of an open batch that has not visibly grown for a while, or None.

        ``began`` is when the last wait for the batch began. The coordinator sees a large batch grow
        in tenths of n, and does not see a small batch grow.
        """
        fill = (await self.exchange.shuffler.conservation(row.batch_id)).fill_tenths
        if self._progress[0] != (row.index, fill):
            is_first = self._progress[0][0] != row.index
            self._progress = (row.index, fill), began if is_first and not fill else self.clock()
        if self.clock() - self._progress[1] < self.stall_seconds:
            return None
        seen = f"with {fill} tenths of its reports" if fill else "with no report to be seen"
        return (
            f"batch {row.index} has been waiting for {self.stall_seconds:g} s or longer {seen}; "
            "check that enough nodes run, enrolled and not revoked, that their users have not "
            "reported yet, and that their logs do not refuse the batch"
        )

    async def _withdraw(self, _: RunRecord, row: DeploymentRecord) -> None:
        """Gives up the batch of a run that is over, or seals the batch if it is full."""
        status = await self.exchange.withdraw(row)
        if row.state == "issued":
            await in_thread(self.store.record_deposit, self.lease, row.index, self.clock())
        else:
            await self._seal(row, status)

    async def _seal(self, row: DeploymentRecord, status: BatchStatus) -> None:
        timings = {"waiting": self.clock() - (row.opened_at or row.issued_at)}
        episodes = status.episodes or row.n
        await self._commit(
            self.store.record_seal, self.lease, row.index, episodes, timings, self.clock()
        )
        log("sealed", row, n=row.n)

    # -- sealed ----------------------------------------------------------------------------------

    async def _count(self, run: RunRecord, row: DeploymentRecord) -> None:
        """Fetches, opens and settles a batch. Each part can be repeated until `settle` commits."""
        context, timings = parse(row.data), dict(row.timings)
        opened = await self._open(row, context, timings)
        with timed(timings, "planning"):
            spend = await in_thread(ledger.spent, context.descriptor, opened.failed)
            settlement = Settlement(row.index, spend, opened, timings)
            settlement = await in_thread(self.learner.complete, run, row, settlement)
            spend = settlement.spend
        with timed(self._storing, "storing"):
            await self._commit(self.store.settle, self.lease, settlement, self.clock())
        event = "counted" if spend.within_promise else "rejected"
        level = logging.INFO if spend.within_promise else logging.WARNING
        counts = {"messages": opened.opened + opened.failed, "failed": opened.failed}
        log(event, row, level, **counts)

    async def _open(self, row: DeploymentRecord, context: Context, timings: Timings) -> OpenedBatch:
        """Returns the batch's counts with noise. For trust ``central``, see `Store.release`."""
        if context.descriptor.trust != "central":
            return await self.exchange.fetch_and_open(row, context, timings)
        if released := await in_thread(self.store.released, row.run_id, row.index):
            return released
        opened = await self.exchange.fetch_and_open(row, context, timings)
        return await in_thread(self.store.release, self.lease, row.index, opened)

    # -- counted, rejected, abandoned ------------------------------------------------------------

    async def _acknowledge(self, _: RunRecord, row: DeploymentRecord) -> None:
        timings = {**row.timings, **self._storing}
        with timed(timings, "acknowledging"):
            await self.exchange.acknowledge(row)
        self._storing.clear()
        await in_thread(
            self._end_batch, self.store.record_acknowledgement, self.lease, row.index, timings
        )
        self.metrics.observe(timings)

    async def _abandon(
        self, row: DeploymentRecord, episodes: int, step: NextStep, reason: str
    ) -> None:
        abandon, now = self.store.abandon, self.clock()
        await self._commit(self._end_batch, abandon, self.lease, row.index, episodes, step, now)
        log("abandoned", row, logging.WARNING, detail=reason)

    # -- commits ---------------------------------------------------------------------------------

    async def _commit(self, change: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Commits a change, and wakes the run's followers because the change wrote an event."""
        try:
            await in_thread(change, *args, **kwargs)
        finally:  # the change is committed even if this driver is stopped meanwhile
            self.signals.fire(self.lease.run_id)

    def _end_batch(self, change: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Commits the last change of a batch, then erases keys that no batch needs any more."""
        change(*args, **kwargs)
        self.keys.erase_unused(self.store.keys_in_use)


def _reported(run: RunRecord, error: Exception) -> RiffleError:
    """Returns the run's error: an explanation of a LearnerError, or else a reference to the log."""
    if isinstance(error, LearnerError):
        return refusal(run.spec, error)
    return LocalError("internal", f"unexpected {type(error).__name__}; see the log")
