"""A cache of nodes and batches, so that most requests need no read before they write.

`Admission` briefly remembers the node of each token and the state of each batch. The cache only
decides whether a body is read, and who may see the list of open batches and a descriptor: every
write checks again in its own transaction. The cache is dropped whenever this process changes a
batch or revokes a node, or is notified that another replica has done so; a revoked node is then
refused immediately. If a notification is lost, other replicas serve a revoked node for at most
`CACHE_SECONDS` longer, but grant it no lease and accept no report from it.
"""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

from riffle.common.process.endpoint import hash_token
from riffle.shuffler.store import batch_rows, users
from riffle.shuffler.store.committer import Store
from riffle.shuffler.waiting import ChangeSignal

T = TypeVar("T")

CACHE_SECONDS = 10.0
MAX_ENTRIES = 4_096


class AnswerCache(Generic[T]):
    """At most `MAX_ENTRIES` answers by key, each for `CACHE_SECONDS` or until ``version`` changes.

    ``clock`` returns seconds.
    """

    def __init__(self, version: Callable[[], int], clock: Callable[[], float]) -> None:
        self._version = version
        self._clock = clock
        self._entries: dict[str, tuple[T, int, float]] = {}

    async def get(self, key: str, read: Callable[[], Awaitable[T]]) -> T:
        """Returns the cached answer if it is still valid, else the result of ``read``."""
        version, now = self._version(), self._clock()  # before reading, so a change counts
        if (entry := self._entries.get(key)) is not None:
            answer, version_read, time_read = entry
            if version == version_read and now < time_read + CACHE_SECONDS:
                return answer
        answer = await read()
        if len(self._entries) >= MAX_ENTRIES:
            self._entries.clear()
        self._entries[key] = (answer, version, now)
        return answer


class Admission:
    """Nodes by token and batches by id, cached until ``changes`` reports a change."""

    def __init__(
        self, store: Store, changes: ChangeSignal, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._nodes: AnswerCache[str] = AnswerCache(lambda: changes.version, clock)
        self._batches: AnswerCache[batch_rows.Batch] = AnswerCache(lambda: changes.version, clock)

    async def node(self, token: str) -> str:
        """Returns the node id of a token, or raises RemoteError ``unauthorized``."""
        read = partial(self._store.read, users.authenticate, token)
        return await self._nodes.get(hash_token(token), read)

    async def node_and_batch(self, token: str, batch_id: str) -> tuple[str, batch_rows.Batch]:
        """Returns the node id and the batch of an upload, before its body is read.

        The batch's counts may be a few uploads old; its keys and sizes never change. Raises
        RemoteError ``unauthorized`` or ``unknown-batch``.
        """
        node = await self.node(token)
        read = partial(self._store.read, batch_rows.find, batch_id)
        return node, await self._batches.get(batch_id, read)
