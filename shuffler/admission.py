"""Whose a token is, and which batch is asked for: remembered for a moment, so that most requests
ask the store nothing before they write.

What is remembered decides only whether a body is read, and who is shown the list of open batches
and a descriptor: every write looks again, in its own transaction. It is forgotten whenever this
process has changed a batch or revoked a node, or hears that another replica has, so a node that is
revoked is refused from then on. Should such news be lost, the others serve it for
`REMEMBERED_SECONDS` more, and none takes a lease or a report of it meanwhile.
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from sqlalchemy import Connection

from riffle.common.endpoint import hash_token
from riffle.shuffler import nodes, store
from riffle.shuffler.access import Access

REMEMBERED_SECONDS = 10.0
KEPT = 4_096

T = TypeVar("T")
Clock = Callable[[], float]


class Memory(Generic[T]):
    """Answers by name, forgotten when ``told`` changes, `REMEMBERED_SECONDS` after they were asked
    for, and when there are more than `KEPT`. ``clock`` returns seconds.
    """

    def __init__(self, told: Callable[[], int], clock: Clock) -> None:
        self._told = told
        self._clock = clock
        self._held: dict[str, tuple[T, tuple[int, float]]] = {}

    @property
    def ticket(self) -> tuple[int, float]:
        """To be taken before the store is read, for `keep`."""
        return self._told(), self._clock()

    def keep(self, name: str, answer: T, ticket: tuple[int, float]) -> None:
        """Remember what was read after a ticket was taken."""
        if len(self._held) >= KEPT:
            self._held.clear()
        self._held[name] = (answer, ticket)

    def get(self, name: str) -> T | None:
        """The answer that still holds."""
        found = self._held.get(name)
        if found is None:
            return None
        answer, (told, asked) = found
        if told == self._told() and self._clock() < asked + REMEMBERED_SECONDS:
            return answer
        del self._held[name]
        return None


class Admission:
    """Nodes by token and open batches by id. ``told`` changes with every batch and revocation."""

    def __init__(
        self, access: Access, told: Callable[[], int], clock: Clock = time.monotonic
    ) -> None:
        self._access = access
        self._nodes: Memory[str] = Memory(told, clock)
        self._batches: Memory[store.Batch] = Memory(told, clock)

    async def node(self, token: str) -> str:
        """Node id of a token.

        Raises:
            RemoteError: ``unauthorized``.
        """
        name = hash_token(token)
        node = self._nodes.get(name)
        if node is None:
            ticket = self._nodes.ticket
            node = await self._access.read(lambda store: nodes.authenticate(store, token))
            self._nodes.keep(name, node, ticket)
        return node

    async def upload(self, token: str, batch_id: str) -> tuple[str, store.Batch]:
        """Node id and batch of an upload, before its body is read.

        The batch's counts may be some uploads old; its keys and sizes never change.

        Raises:
            RemoteError: ``unauthorized``, ``unknown-batch``.
        """
        name = hash_token(token)
        known, open_batch = self._nodes.get(name), self._batches.get(batch_id)
        if known is not None and open_batch is not None:
            return known, open_batch

        def look(connection: Connection) -> tuple[str, store.Batch]:
            return nodes.authenticate(connection, token), store.find(connection, batch_id)

        ticket = self._nodes.ticket
        node, batch = await self._access.read(look)
        self._nodes.keep(name, node, ticket)
        if batch.state == "open":
            self._batches.keep(batch_id, batch, ticket)
        return node, batch
