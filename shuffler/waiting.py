"""Bounds on what waits in memory: long polls, and the bytes of uploads that are being received.

Long polls wait on a `ChangeSignal`; a `Budget` bounds how many wait.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Message

from riffle.common.protocol.errors import LocalError

T = TypeVar("T")

RECHECK_SECONDS = 1.0
"""Seconds until a waiter checks again where its answer may change without a signal: leases expire
silently, and notifications of other replicas may be lost."""

IDLE_RECHECK_SECONDS = 5.0
"""Seconds until a waiter checks again elsewhere: the next check ends a short batch that expired."""

CHECKS_A_SECOND = 200
"""Of all waiters together: the more wait, the less often each checks, to bound processor time."""


class Budget:
    """A bound on something that many requests hold at once, of ``what``.

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
        """How much all holders have now."""
        return self._taken

    @contextmanager
    def meter(self, holder: str = "") -> Iterator[Callable[[int], None]]:
        """Yields a function that takes more at each call; all is returned when the context ends.

        At the limit the function takes nothing and raises LocalError ``too-many-requests`` at once,
        since waiting would only move the queue.
        """
        held = 0

        def take(amount: int) -> None:
            nonlocal held
            free = self._limit - self._taken
            if amount > free or self._held.get(holder, 0) + amount > self._each:
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
    """Returns the request with its body charged as it arrives: a declared length costs nothing."""

    async def receive() -> Message:
        message = await request.receive()
        take(len(message.get("body", b"")))
        return message

    return Request(request.scope, receive)


class ChangeSignal:
    """Wakes long polls when a change that they may wait for was committed.

    ``version`` grows with every change: an answer read before may be out of date. ``shared``: other
    replicas change the same store, and their notifications may be lost.
    """

    def __init__(self, max_waiting: int = 4096, *, shared: bool = False) -> None:
        self._event = asyncio.Event()
        self._shared = shared
        self._waiters = Budget(max_waiting, "long polls")
        self._closed = False
        self.version = 0

    def pause(self, *, silent: bool) -> float:
        """Returns the seconds until a waiter checks again; ``silent``: no signal may tell it."""
        seconds = RECHECK_SECONDS if silent or self._shared else IDLE_RECHECK_SECONDS
        return max(seconds, self._waiters.taken / CHECKS_A_SECOND)

    def notify(self) -> None:
        """Wakes all waiters."""
        self.version += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    def close(self) -> None:
        """Ends all waiting, now and later, because the service stops."""
        self._closed = True
        self.notify()

    async def poll(
        self,
        seconds: float,
        read: Callable[[], Awaitable[T]],
        is_enough: Callable[[T], bool],
        may_change_silently: Callable[[T], bool] = lambda _: False,
    ) -> T:
        """Returns what ``read`` returns once it is enough, after ``seconds``, or at `close`.

        ``may_change_silently`` says whether an answer may change without a call of `notify`. Raises
        LocalError ``too-many-requests`` if too many polls wait already.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        with self._waiters.meter() as take:
            take(1)
            while True:
                event = self._event  # taken before reading: a change meanwhile sets this one
                answer = await read()
                remaining = deadline - clock()
                if is_enough(answer) or remaining <= 0 or self._closed:
                    return answer
                pause = self.pause(silent=may_change_silently(answer))
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), min(remaining, pause))
