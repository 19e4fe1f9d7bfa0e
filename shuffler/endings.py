"""How batches end: in time, by a lost secret, and what is destroyed then, in which order.

``acknowledged`` or ``abandoned`` is committed first, then the secret destroyed, then the reports
deleted, then ``clean``. `Endings.tidy` does the last three for whatever it finds undone.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from riffle.shuffler import store
from riffle.shuffler.access import Access
from riffle.shuffler.journal import note
from riffle.shuffler.vault import SecretLostError, Vault
from riffle.shuffler.waiting import Changes

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
            await self._access.write(partial(store.end_due, now=now, retention=retention))
            # Read anew, outside any write: a secret goes only after its batch's end is durable.
            for batch_id in await self._access.read(store.to_clean):
                await self._clean(batch_id)
        self._changes.notify()

    async def find_lost(self) -> int:
        """Give up every batch that needs a secret and has none; returns how many have theirs.

        Raises:
            LocalError: ``unavailable``: a secret is there and cannot be read.
        """
        needed = await self._access.read(store.holding_secrets)
        for batch_id in sorted(needed):
            try:
                await asyncio.to_thread(self._vault.get, batch_id)
            except SecretLostError:
                await self.lose(batch_id)
                needed.remove(batch_id)
        return len(needed)

    async def lose(self, batch_id: str) -> None:
        """A batch's secret is gone: give the batch up, unless its messages have left."""
        state = await self._access.write(partial(store.lose, batch_id=batch_id))
        if state in store.NEED_SECRET:  # else it ended meanwhile, and its secret with it
            note("secret-lost", batch_id=batch_id, state=state)
        await self.tidy()

    def _due(self, connection: Connection) -> bool:
        return store.anything_due(connection, self._clock(), self._retention)

    async def _clean(self, batch_id: str) -> None:
        self._forget(batch_id)
        await asyncio.to_thread(self._vault.destroy, batch_id)
        batch = await self._access.read(partial(store.find, batch_id=batch_id))
        for start in range(0, batch.next_slot, SLOTS_A_DELETE):
            slots = range(start, start + SLOTS_A_DELETE)
            await self._access.write(partial(store.delete_reports, batch_id=batch_id, slots=slots))
        await self._access.write(partial(store.mark_clean, batch_id=batch_id))
