"""Bounds the number of long polls that wait, and the bytes of uploads being received."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Message

from riffle.common.protocol.errors import LocalError

T = TypeVar("T")

RECHECK_SECONDS = 1.0
"""Seconds until a waiter checks again if its answer may change without a signal. Leases expire
silently, and notifications of other replicas may be lost."""

IDLE_RECHECK_SECONDS = 5.0
"""Seconds until all other waiters check again. Their check also ends a batch that has expired."""

CHECKS_A_SECOND = 200
"""The most checks a second by all waiters together. If many wait, each waiter checks less often."""


class Budget:
    """Bounds the amount of a resource, named ``what``, that all requests together hold.

    ``each`` bounds the amount of one holder, so that nobody can take everything.
    """

    def __init__(self, limit: int, what: str, each: int | None = None) -> None:
        self._limit = limit
        self._taken = 0
        self._what = what
        self._each = limit if each is None else each
        self._held: dict[str, int] = {}

    @property
    def taken(self) -> int:
        """The amount of the resource that all requests together hold now."""
        return self._taken

    @contextmanager
    def meter(self, holder: str = "") -> Iterator[Callable[[int], None]]:
        """Yields a function that takes the given amount of the resource for ``holder``.

        The end of the context gives back all that was taken. A call that would exceed a limit takes
        nothing and raises LocalError ``too-many-requests``.
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
    """Returns a request with the same body. Each read of a piece calls ``take`` with its size."""

    async def receive() -> Message:
        message = await request.receive()
        take(len(message.get("body", b"")))
        return message

    return Request(request.scope, receive)


class ChangeSignal:
    """Wakes long polls when a change that they may wait for is committed.

    ``version`` grows with every change. ``shared``: notifications of other replicas may be lost.
    """

    def __init__(self, max_waiting: int = 4096, *, shared: bool = False) -> None:
        self._event = asyncio.Event()
        self._shared = shared
        self._waiters = Budget(max_waiting, "long polls")
        self._closed = False
        self.version = 0

    def pause(self, *, silent: bool) -> float:
        """Returns the seconds until a waiter checks again: fewer if `notify` may miss changes."""
        seconds = RECHECK_SECONDS if silent or self._shared else IDLE_RECHECK_SECONDS
        return max(seconds, self._waiters.taken / CHECKS_A_SECOND)

    def notify(self) -> None:
        """Wakes all waiters."""
        self.version += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    def close(self) -> None:
        """Ends all waiting for good, because the service stops."""
        self._closed = True
        self.notify()

    async def poll(
        self,
        seconds: float,
        read: Callable[[], Awaitable[T]],
        is_enough: Callable[[T], bool],
        may_change_silently: Callable[[T], bool] = lambda _: False,
    ) -> T:
        """Reads until ``is_enough`` accepts an answer, ``seconds`` are over or `close` is called.

        Returns the last answer. ``may_change_silently`` tells whether an answer may change without
        a call of `notify`. Raises LocalError ``too-many-requests`` if too many polls wait already.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        with self._waiters.meter() as take:
            take(1)
            while True:
                event = self._event  # taken before reading, so a change during the read sets it
                answer = await read()
                remaining = deadline - clock()
                if is_enough(answer) or remaining <= 0 or self._closed:
                    return answer
                pause = self.pause(silent=may_change_silently(answer))
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), min(remaining, pause))
