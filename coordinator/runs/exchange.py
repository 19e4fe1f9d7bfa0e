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

from riffle.common.protocol.descriptor import Context, parse, sign_deposit
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.wire import BatchState, BatchStatus
from riffle.coordinator.batches.analyzer import Analyzer, OpenedBatch
from riffle.coordinator.batches.shuffler_client import Messages, ShufflerClient
from riffle.coordinator.metrics import JOURNAL
from riffle.coordinator.store.records import DeploymentRecord

STATUS_SECONDS = 10.0
"""Longest wait for a status, so that a batch's trouble is seen within half a minute."""
EXPIRY_MARGIN_SECONDS = 2.0
LEAST_POLL_SECONDS = 0.05
EXPIRED = "expired or was abandoned"
FULL: tuple[BatchState, ...] = ("sealed", "forwarded")
Timings = MutableMapping[str, float]


class BatchGoneError(Exception):
    """The batch will never be counted; ``reason`` says why. ``episodes`` were executed for it."""

    def __init__(self, reason: str, episodes: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.episodes = episodes


@contextlib.contextmanager
def timed(timings: Timings, part: str) -> Iterator[None]:
    """Records how many seconds a block took, as ``part``; nothing if the block raises."""
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
        """Deposits the stored descriptor. The same bytes always get the same answer.

        Raises BatchGoneError if the batch expired, or if its key was erased before anybody saw the
        batch. Raises LocalError ``unavailable`` if the clocks disagree: every new issue would be
        late as well, and the deployment's tries would soon be used up.
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
        """Waits for the last report, for one long poll at most; returns the status.

        Abandons an expired batch, unless it fills first; the next call tells which happened.

        Raises BatchGoneError if the batch expired, was abandoned or is lost, and LocalError
        ``wrong-state`` if the batch is further at the shuffler than in this store.
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
            raise BatchGoneError(EXPIRED, status.episodes or 0)
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
        """Returns the status of a full batch; abandons any other.

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
        """Fetches a full batch's messages (the same bytes until acknowledged) and opens them.

        Raises BatchGoneError if the shuffler has lost the messages. They also count as lost if this
        store is an older copy and the newer store has counted the batch: only the newer store knows
        what was spent, and the batch's users cannot report again.
        """
        with timed(timings, "fetching"):
            messages = await self._fetch(row, context)
        with timed(timings, "opening"):
            return await self.analyzer.open(context, messages)

    async def acknowledge(self, row: DeploymentRecord) -> None:
        """Tells the shuffler to erase a settled batch, and which of its messages failed.

        A refusal is only logged. The counts are already stored, and a shuffler that has nothing to
        erase must not end the run.
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
                # Messages that cannot be opened are not fetched again and again.
                if (await self.shuffler.status(row.batch_id, 0.0)).state in FULL:
                    raise
                raise _lost(row) from None
            return await self.shuffler.messages(row.batch_id, size)
        except RemoteError as error:
            if error.slug in ("late", "unknown-batch"):
                raise _lost(row) from error
            raise

    async def _abandon(self, row: DeploymentRecord) -> None:
        """Gives up a batch that is not full; the shuffler keeps a full one."""
        try:
            await self.shuffler.abandon(row.batch_id)
        except RemoteError as error:
            if error.slug not in ("wrong-state", "unknown-batch"):
                raise


def log(
    event: str, row: DeploymentRecord, level: int = logging.INFO, **fields: str | float
) -> None:
    """Logs an event of a batch under its id, as every service does."""
    fields |= {"run_id": row.run_id, "deployment": row.index, "batch_id": row.batch_id}
    JOURNAL.note(event, level, **fields)


def _lost(row: DeploymentRecord) -> BatchGoneError:
    return BatchGoneError("was lost by the shuffler", row.episodes_executed)
