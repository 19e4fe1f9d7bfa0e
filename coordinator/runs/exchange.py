"""The exchange with the shuffler about one batch: deposit, wait, fetch and open, acknowledge.

This module interprets the shuffler's refusals that concern one batch, and passes other errors to
the driver. Every step may be repeated.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass

from riffle.common.protocol.descriptor import Context, parse
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.signatures import sign_deposit
from riffle.common.protocol.wire import BatchState, BatchStatus
from riffle.coordinator.batches.analyzer import Analyzer, OpenedBatch
from riffle.coordinator.batches.shuffler_client import Messages, ShufflerClient
from riffle.coordinator.metrics import JOURNAL
from riffle.coordinator.store.records import DeploymentRecord

STATUS_SECONDS = 10.0
"""The longest wait for a status: short enough to show a batch's trouble within half a minute."""
EXPIRY_MARGIN_SECONDS = 2.0
LEAST_POLL_SECONDS = 0.05
EXPIRED = "expired before it was full"
FULL: tuple[BatchState, ...] = ("sealed", "forwarded")
Timings = MutableMapping[str, float]


class BatchGoneError(Exception):
    """Raised if a batch will never be counted. ``episodes``: the number executed for the batch."""

    def __init__(self, reason: str, episodes: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.episodes = episodes


@contextlib.contextmanager
def timed(timings: Timings, part: str) -> Iterator[None]:
    """Stores in ``timings[part]`` how many seconds a block took, unless the block raises."""
    start = time.perf_counter()
    yield
    timings[part] = time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class BatchExchange:
    """The steps of a batch at the shuffler. ``clock`` returns seconds since 1970."""

    shuffler: ShufflerClient
    analyzer: Analyzer
    signing_key: bytes
    clock: Callable[[], float]

    async def deposit(self, row: DeploymentRecord) -> None:
        """Deposits the stored descriptor. A repeated deposit gets the same answer.

        Raises BatchGoneError if the batch expired, or if its key was erased. Raises LocalError
        ``unavailable`` if the batch has expired by the shuffler's clock but not by ``clock``.
        Then one of the clocks is wrong, and a reissued batch would be late, too.
        """
        try:
            self.analyzer.check_key(parse(row.data))
        except LocalError as error:
            raise BatchGoneError("was issued under a key that is gone", 0) from error
        signature = sign_deposit(self.signing_key, row.data)
        try:
            await self.shuffler.deposit(row.batch_id, row.data, signature)
        except RemoteError as error:
            if error.slug != "late":
                raise
            left = row.descriptor.expires_at - self.clock()
            if left <= 0:
                raise BatchGoneError(EXPIRED, 0) from error
            raise LocalError(
                "unavailable",
                "the shuffler says that a new batch has expired: correct its clock or this one "
                f"({left:.0f} s left by ours)",
            ) from error

    async def wait_until_full(self, row: DeploymentRecord) -> BatchStatus:
        """Waits until the batch is full, for one long poll at most; returns the batch's status.

        If the batch has expired and is not full, abandons the batch. The next call tells what
        became of the batch.

        Raises BatchGoneError if the batch was abandoned or is lost. Raises LocalError
        ``wrong-state`` if the batch is acknowledged or erased at the shuffler. The cause is that
        this store is an older copy.
        """
        started = time.perf_counter()
        left = row.descriptor.expires_at + EXPIRY_MARGIN_SECONDS - self.clock()
        wait = max(0.0, min(left, STATUS_SECONDS))
        try:
            status = await self.shuffler.status(row.batch_id, wait)
        except RemoteError as error:
            raise _lost(row) if error.slug == "unknown-batch" else error from error
        if status.state in FULL:
            return status
        if status.state == "abandoned":
            expired = row.descriptor.expires_at <= self.clock()
            reason = EXPIRED if expired else "was given up before it was full"
            raise BatchGoneError(reason, status.episodes or 0)
        if status.state != "open":
            raise LocalError(
                "wrong-state",
                f"batch {row.batch_id} is {status.state} at the shuffler but not counted here: is "
                "this an older copy of the store?",
            )
        if left <= 0:
            await self._abandon(row)
        elif time.perf_counter() - started < LEAST_POLL_SECONDS:
            await asyncio.sleep(LEAST_POLL_SECONDS)
        return status

    async def withdraw(self, row: DeploymentRecord) -> BatchStatus:
        """Returns the status of a full batch; abandons any other batch.

        Raises BatchGoneError if the batch was not full, or was never deposited.
        """
        await self._abandon(row)
        episodes = 0
        with contextlib.suppress(RemoteError):
            status = await self.shuffler.status(row.batch_id, 0.0)
            if status.state in FULL:
                if row.state == "issued":  # refused if the shuffler's batch is from a newer store
                    await self.deposit(row)
                return status
            episodes = status.episodes or 0
        raise BatchGoneError("belongs to a run that is over", episodes)

    async def fetch_and_open(
        self, row: DeploymentRecord, context: Context, timings: Timings
    ) -> OpenedBatch:
        """Fetches a full batch's messages (the same bytes at every try) and opens them.

        Raises BatchGoneError if the shuffler has lost or erased the messages. The shuffler has
        erased them if this store is an older copy and the newer store counted the batch.
        """
        with timed(timings, "fetching"):
            messages = await self._fetch(row, context)
        with timed(timings, "opening"):
            return await self.analyzer.open(context, messages)

    async def acknowledge(self, row: DeploymentRecord) -> None:
        """Tells the shuffler which messages of a settled batch failed, so that it erases the batch.

        A refusal is only logged, because the counts are already stored and the run can go on.
        """
        try:
            await self.shuffler.acknowledge(row.batch_id, row.messages_sha256 or "", row.named)
        except RemoteError as error:
            log("not-acknowledged", row, logging.WARNING, problem=error.slug, detail=error.detail)

    async def _fetch(self, row: DeploymentRecord, context: Context) -> Messages:
        size = context.descriptor.release_bytes
        try:
            try:
                self.analyzer.check_key(context)
            except LocalError:
                # Without the key, the messages are not fetched, because every try would fetch them
                # again.
                if (await self.shuffler.status(row.batch_id, 0.0)).state in FULL:
                    raise
                raise _lost(row) from None
            return await self.shuffler.messages(row.batch_id, size)
        except RemoteError as error:
            if error.slug in ("late", "unknown-batch"):
                raise _lost(row) from error
            raise

    async def _abandon(self, row: DeploymentRecord) -> None:
        """Gives up a batch that is not full; the shuffler keeps a full batch."""
        try:
            await self.shuffler.abandon(row.batch_id)
        except RemoteError as error:
            if error.slug not in ("wrong-state", "unknown-batch"):
                raise


def log(
    event: str, row: DeploymentRecord, level: int = logging.INFO, **fields: str | float
) -> None:
    """Logs an event of a batch with the batch's id, as every service does."""
    fields |= {"run_id": row.run_id, "deployment": row.index, "batch_id": row.batch_id}
    JOURNAL.note(event, level, **fields)


def _lost(row: DeploymentRecord) -> BatchGoneError:
    return BatchGoneError("was lost by the shuffler", row.episodes_executed)
