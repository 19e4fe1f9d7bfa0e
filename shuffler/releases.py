"""How batches end: in time, by a lost secret, and what is destroyed then, in which order.

``acknowledged`` or ``abandoned`` is committed first, then the secret destroyed, then the reports
deleted, then ``clean``. `Endings.tidy` does the last three for whatever it finds undone.

Handing batches over: the permuted bytes, made when asked for, the same every time.

The digest of the bytes is committed before the first byte is sent (`records.mark_forwarded`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.database import try_claim
from riffle.shuffler.admission import Changes
from riffle.shuffler.metrics import ShufflerMetrics, note
from riffle.shuffler.permutation import Release, shuffle
from riffle.shuffler.states import after
from riffle.shuffler.store import records
from riffle.shuffler.store.committer import Access
from riffle.shuffler.store.vault import SecretLostError, Stored, Vault

SLOTS_A_DELETE = 4_096

T = TypeVar("T")


class Endings:
    """Ends batches of one store and vault. ``forget`` drops what memory holds of one,
    who waits for ``changes`` is told.

    ``clock`` returns seconds since 1970; ``retention`` is how long after its expiry, in seconds,
    a complete batch is kept for an analyzer that does not come.
    """

    def __init__(
        self,
        access: Access,
        vault: Vault,
        clock: Callable[[], int],
        retention: int,
        forget: Callable[[str], object],
        changes: Changes,
    ) -> None:
        self._access = access
        self._vault = vault
        self._clock = clock
        self._retention = retention
        self._forget = forget
        self._changes = changes
        self._tidying = asyncio.Lock()

    async def settled(self, query: Callable[[Connection], T]) -> T:
        """What a query finds after `tidy`: in one read where nothing is due, as mostly."""

        def look(connection: Connection) -> tuple[T] | None:
            return None if self._due(connection) else (query(connection),)

        found = await self._access.read(look)
        if found is not None:
            return found[0]
        await self.tidy()
        return await self._access.read(query)

    async def tidy(self) -> None:
        """End what is due; destroy and delete what is over. Repeats harmlessly."""
        now, retention = self._clock(), self._retention
        async with self._tidying:
            if not await self._access.read(self._due):
                return
            await self._access.write(partial(records.end_due, now=now, retention=retention))
            # Read anew, outside any write: a secret goes only after its batch's end is durable.
            for batch_id in await self._access.read(records.to_clean):
                await self._clean(batch_id)
        self._changes.notify()

    async def find_lost(self) -> int:
        """Give up every batch that needs a secret and has none; returns how many have theirs.

        Raises:
            LocalError: ``unavailable``: a secret is there and cannot be read.
        """
        needed = await self._access.read(records.holding_secrets)
        for batch_id in sorted(needed):
            try:
                await asyncio.to_thread(self._vault.get, batch_id)
            except SecretLostError:
                await self.lose(batch_id)
                needed.remove(batch_id)
        return len(needed)

    async def lose(self, batch_id: str) -> None:
        """A batch's secret is gone: give the batch up, unless its messages have left."""
        state = await self._access.write(partial(records.lose, batch_id=batch_id))
        if state in records.NEED_SECRET:  # else it ended meanwhile, and its secret with it
            note("secret-lost", batch_id=batch_id, state=state)
        await self.tidy()

    def _due(self, connection: Connection) -> bool:
        return records.anything_due(connection, self._clock(), self._retention)

    async def _clean(self, batch_id: str) -> None:
        self._forget(batch_id)
        await asyncio.to_thread(self._vault.destroy, batch_id)
        batch = await self._access.read(partial(records.find, batch_id=batch_id))
        for start in range(0, batch.next_slot, SLOTS_A_DELETE):
            slots = range(start, start + SLOTS_A_DELETE)
            await self._access.write(
                partial(records.delete_reports, batch_id=batch_id, slots=slots)
            )
        await self._access.write(partial(records.mark_clean, batch_id=batch_id))


RELEASES_IN_MEMORY = 2


class Releases:
    """Releases of one store and vault, the last few kept. ``lose`` gives up a batch's secret."""

    def __init__(
        self,
        access: Access,
        vault: Vault,
        metrics: ShufflerMetrics,
        lose: Callable[[str], Awaitable[None]],
    ) -> None:
        self._access = access
        self._vault = vault
        self._metrics = metrics
        self._lose = lose
        self._kept: dict[str, Release] = {}
        self._releasing = asyncio.Lock()

    def forget(self, batch_id: str) -> None:
        """Drop what memory holds of a batch."""
        self._kept.pop(batch_id, None)

    async def release(self, batch_id: str) -> Release:
        """The permuted messages of a sealed batch.

        Raises:
            RemoteError: ``unknown-batch``, ``batch-not-ready``, ``late``.
        """
        async with self._releasing:
            batch = await self._access.read(partial(records.find, batch_id=batch_id))
            after(batch.state, "forward")
            release = self._kept.get(batch_id) or await self._shuffled(batch)
            await self._access.write(
                partial(
                    records.mark_forwarded,
                    batch_id=batch_id,
                    sha256=release.sha256,
                    messages=len(release.messages),
                )
            )
            self._keep(batch_id, release)
        return release

    async def _shuffled(self, batch: records.Batch) -> Release:
        try:
            with self._metrics.shuffling.time():
                release = await asyncio.to_thread(self._shuffle, batch)
        except SecretLostError as error:
            await self._lose(batch.batch_id)
            raise RemoteError(
                "late", "the batch's secret is lost; its messages are handed over no more"
            ) from error
        self._metrics.shuffled.inc(len(release.messages))
        return release

    def _shuffle(self, batch: records.Batch) -> Release:
        secret = self._vault.get(batch.batch_id)
        with self._access.engine.connect() as connection:
            if not try_claim(connection, f"shuffle {batch.batch_id}"):
                # Both would make the same bytes; one of them is enough work and memory.
                detail = "another replica is permuting this batch"
                raise LocalError("unavailable", detail, retry_after=1)
            stored = Stored(batch.batch_id, secret)
            info = batch.report_info
            with closing(records.sealed_reports(connection, batch.batch_id)) as kept:
                return shuffle(
                    ((slots, stored.decrypt(slots, data, info)) for slots, data in kept),
                    secret.permutation,
                    n=batch.n,
                    L=batch.L,
                    message_bytes=batch.message_bytes,
                )

    def _keep(self, batch_id: str, release: Release) -> None:
        self.forget(batch_id)
        while len(self._kept) >= RELEASES_IN_MEMORY:
            self._kept.pop(next(iter(self._kept)))
        self._kept[batch_id] = release
