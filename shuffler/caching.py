"""A cache of nodes and batches, so that most requests need not read the store before they write.

The cache decides only whether a body is read, and who may see open batches and descriptors. Every
write checks again in its own transaction.

The cache is dropped when this process changes a batch or revokes a node, or is notified that
another replica has done so. So a revoked node is refused immediately. If a notification is lost, a
replica may serve a revoked node for `CACHE_SECONDS` more. Even then the replica grants the node no
lease and accepts no report from it.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from sqlalchemy import Connection

from riffle.common.process.endpoint import hash_token
from riffle.shuffler.store import batch_rows, users
from riffle.shuffler.store.committer import Store
from riffle.shuffler.waiting import ChangeSignal

T = TypeVar("T")

CACHE_SECONDS = 10.0
MAX_ENTRIES = 4_096


class Admission:
    """Caches nodes by token and batches by id.

    It keeps at most `MAX_ENTRIES` answers, each for `CACHE_SECONDS` or until ``changes`` signals a
    change. ``clock`` returns seconds.
    """

    def __init__(
        self, store: Store, changes: ChangeSignal, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._changes = changes
        self._clock = clock
        self._entries: dict[str, tuple[Any, int, float]] = {}

    async def node(self, token: str) -> str:
        """Returns the node id of a token, or raises RemoteError ``unauthorized``."""
        return await self._cached(hash_token(token), users.authenticate, token)

    async def batch(self, batch_id: str) -> batch_rows.Batch:
        """Returns the batch of an upload, or raises RemoteError ``unknown-batch``.

        Its counts may be a few uploads old; its keys and sizes never change.
        """
        return await self._cached(batch_id, batch_rows.find, batch_id)

    async def _cached(self, key: str, query: Callable[[Connection, str], T], argument: str) -> T:
        version, now = self._changes.version, self._clock()  # a change during the read is newer
        answer, version_read, time_read = self._entries.get(key, (None, None, 0.0))
        if version != version_read or now >= time_read + CACHE_SECONDS:
            answer = await self._store.read(query, argument)
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            self._entries[key] = (answer, version, now)
        return cast("T", answer)
