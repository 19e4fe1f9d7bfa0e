"""Bounds on what waits: long polls, and bytes of uploads on their way.

Whose a token is, and which batch is asked for: remembered for a moment, so that most requests
ask the store nothing before they write.

What is remembered decides only whether a body is read, and who is shown the list of open batches
and a descriptor: every write looks again, in its own transaction. It is forgotten whenever this
process has changed a batch or revoked a node, or hears that another replica has, so a node that is
revoked is refused from then on. Should such news be lost, the others serve it for
`REMEMBERED_SECONDS` more, and none takes a lease or a report of it meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.types import Message

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import LocalError
from riffle.shuffler.store import records, users
from riffle.shuffler.store.committer import Access

T = TypeVar("T")

RECHECK_SECONDS = 1.0
"""A long poll looks again this often where its answer may change unsaid: leases expire silently,
and news of other replicas may be lost."""

STILL_SECONDS = 5.0
"""And this often elsewhere: a batch that is short expires, and whoever looks next ends it."""

LOOKS_A_SECOND = 200
"""Of all long polls together: many who wait look less often each, and never take a processor."""


class Budget:
    """A bound on something many requests hold at once; who exceeds it is told to come back.

    ``each`` bounds what one holder has of it, so that none leaves nothing to the others.
    """

    def __init__(self, limit: int, what: str, each: int | None = None) -> None:
        self._limit = limit
        self._taken = 0
        self._what = what
        self._each = limit if each is None else each
        self._held: dict[str, int] = {}

    @property
    def taken(self) -> int:
        """How much is held now, by all."""
        return self._taken

    @contextmanager
    def hold(self, amount: int) -> Iterator[None]:
        """Hold ``amount`` while the context lasts.

        Raises:
            LocalError: ``too-many-requests``, at once: waiting would only move the queue.
        """
        with self.meter() as take:
            take(amount)
            yield

    @contextmanager
    def meter(self, holder: str = "") -> Iterator[Callable[[int], None]]:
        """A function that takes so much more each time; all goes back when the context ends.

        It raises as `hold` does, and then has taken nothing.
        """
        held = 0

        def take(amount: int) -> None:
            nonlocal held
            room = self._limit - self._taken
            if amount > room or self._held.get(holder, 0) + amount > self._each:
                raise LocalError("too-many-requests", f"too many {self._what} now", retry_after=1)
            self._change(holder, amount)
            held += amount

        try:
            yield take
        finally:
            self._change(holder, -held)

    def _change(self, holder: str, amount: int) -> None:
        self._taken += amount
        self._held[holder] = self._held.get(holder, 0) + amount
        if self._held[holder] == 0:
            del self._held[holder]


def metered(request: Request, take: Callable[[int], None]) -> Request:
    """The request, its body charged as it arrives: what is declared and not sent costs nothing."""

    async def receive() -> Message:
        message = await request.receive()
        take(len(message.get("body", b"")))
        return message

    return Request(request.scope, receive)


class Changes:
    """Wakes long polls when something they may wait for was committed.

    ``told`` counts how often: what was read before it changed may be out of date.
    """

    def __init__(self, max_waiting: int = 4096, *, shared: bool = False) -> None:
        """``shared``: other replicas change the same store, and their news may be lost."""
        self._event = asyncio.Event()
        self._shared = shared
        self._places = Budget(max_waiting, "long polls")
        self._closed = False
        self.told = 0

    def pause(self, *, unsaid: bool) -> float:
        """Seconds after which who waits looks again; ``unsaid``: what he saw may change so."""
        seconds = RECHECK_SECONDS if unsaid or self._shared else STILL_SECONDS
        return max(seconds, self._places.taken / LOOKS_A_SECOND)

    def notify(self) -> None:
        """Wake everyone who waits."""
        self.told += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    def close(self) -> None:
        """Nobody waits any longer, now or later: the service stops."""
        self._closed = True
        self.notify()

    async def poll(
        self,
        seconds: float,
        look: Callable[[], Awaitable[T]],
        enough: Callable[[T], bool],
        unsaid: Callable[[T], bool] = lambda _: False,
    ) -> T:
        """What ``look`` returns, once it is ``enough``, ``seconds`` have passed, or at `close`.

        ``unsaid`` tells whether what was found may change without a call of `notify`.

        Raises:
            LocalError: ``too-many-requests``, when too many wait already.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        with self._places.hold(1):
            while True:
                event = self._event  # taken before looking: a change meanwhile sets this one
                found = await look()
                left = deadline - clock()
                if enough(found) or left <= 0 or self._closed:
                    return found
                pause = self.pause(unsaid=unsaid(found))
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), min(left, pause))


REMEMBERED_SECONDS = 10.0
KEPT = 4_096

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
        self._batches: Memory[records.Batch] = Memory(told, clock)

    async def node(self, token: str) -> str:
        """Node id of a token.

        Raises:
            RemoteError: ``unauthorized``.
        """
        name = hash_token(token)
        node = self._nodes.get(name)
        if node is None:
            ticket = self._nodes.ticket
            node = await self._access.read(lambda store: users.authenticate(store, token))
            self._nodes.keep(name, node, ticket)
        return node

    async def upload(self, token: str, batch_id: str) -> tuple[str, records.Batch]:
        """Node id and batch of an upload, before its body is read.

        The batch's counts may be some uploads old; its keys and sizes never change.

        Raises:
            RemoteError: ``unauthorized``, ``unknown-batch``.
        """
        name = hash_token(token)
        known, open_batch = self._nodes.get(name), self._batches.get(batch_id)
        if known is not None and open_batch is not None:
            return known, open_batch

        def look(connection: Connection) -> tuple[str, records.Batch]:
            return users.authenticate(connection, token), records.find(connection, batch_id)

        ticket = self._nodes.ticket
        node, batch = await self._access.read(look)
        self._nodes.keep(name, node, ticket)
        if batch.state == "open":
            self._batches.keep(batch_id, batch, ticket)
        return node, batch
