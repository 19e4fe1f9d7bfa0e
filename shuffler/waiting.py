"""Bounds on what waits: long polls, and bytes of uploads on their way."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Message

from riffle.common.errors import LocalError

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
