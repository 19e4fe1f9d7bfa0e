"""Handing batches over: the permuted bytes, made when asked for, the same every time.

The digest of the bytes is committed before the first byte is sent (`store.mark_forwarded`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial

from riffle.common.database import claimed
from riffle.common.errors import LocalError, RemoteError
from riffle.shuffler import store
from riffle.shuffler.access import Access
from riffle.shuffler.metrics import ShufflerMetrics
from riffle.shuffler.permute import Release, shuffle
from riffle.shuffler.states import after
from riffle.shuffler.stored import Stored
from riffle.shuffler.vault import SecretLostError, Vault

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
            batch = await self._access.read(partial(store.find, batch_id=batch_id))
            after(batch.state, "forward")
            release = self._kept.get(batch_id) or await self._shuffled(batch)
            await self._access.write(
                partial(
                    store.mark_forwarded,
                    batch_id=batch_id,
                    sha256=release.sha256,
                    messages=len(release.messages),
                )
            )
            self._keep(batch_id, release)
        return release

    async def _shuffled(self, batch: store.Batch) -> Release:
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

    def _shuffle(self, batch: store.Batch) -> Release:
        secret = self._vault.get(batch.batch_id)
        with self._access.engine.connect() as connection:
            if not claimed(connection, f"shuffle {batch.batch_id}"):
                # Both would make the same bytes; one of them is enough work and memory.
                detail = "another replica is permuting this batch"
                raise LocalError("unavailable", detail, retry_after=1)
            stored = Stored(batch.batch_id, secret)
            info = batch.report_info
            with closing(store.sealed_reports(connection, batch.batch_id)) as kept:
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
