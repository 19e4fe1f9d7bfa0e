"""How much one caller, and all of them together, may ask for at a time. Pure but for `AtMost`.

Who exceeds a limit is told at once, and when to come back: waiting here would only move the queue.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from riffle.common.errors import LocalError
from riffle.common.metrics import PROBLEM
from riffle.common.service import problem_response


@dataclass(slots=True)
class Bucket:
    """A token bucket: ``rate`` a second, at most ``burst`` saved up. Times are of one clock."""

    rate: float
    burst: float
    _left: float = math.nan
    _at: float = 0.0

    def take(self, amount: float, now: float) -> float:
        """Take ``amount``; returns 0, or after how many seconds to ask again, nothing taken.

        More than a burst is taken from a full bucket, which then owes the rest.
        """
        saved = self.burst if math.isnan(self._left) else self._left
        self._left = min(self.burst, saved + max(0.0, now - self._at) * self.rate)
        self._at = now
        short = min(amount, self.burst) - self._left
        if short > 0:
            return short / self.rate
        self._left -= amount
        return 0.0

    def give(self, amount: float) -> None:
        """Put back what was taken for nothing."""
        self._left = min(self.burst, self._left + amount)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one caller may do: requests and reports a second (bursts: ten seconds'), at once."""

    requests: float
    reports: float
    at_once: int


BURST_SECONDS = 10.0


@dataclass(slots=True)
class _Caller:
    requests: Bucket
    reports: Bucket
    under_way: int = 0


class Callers:
    """Rates and concurrency of callers by name; only authenticated ones, so there are few."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._callers: dict[str, _Caller] = {}

    @contextmanager
    def request(self, name: str, now: float) -> Iterator[None]:
        """A request of a caller while it lasts.

        Raises:
            LocalError: ``too-many-requests``.
        """
        caller = self._caller(name)
        if caller.under_way >= self._allowance.at_once:
            raise slower(f"{caller.under_way} requests of this caller are under way", 1)
        if after := caller.requests.take(1, now):
            raise slower("too many requests a second", after)
        caller.under_way += 1
        try:
            yield
        finally:
            caller.under_way -= 1

    def reports(self, name: str, count: int, now: float) -> None:
        """Reports of a caller.

        Raises:
            LocalError: ``too-many-requests``; none of them was looked at.
        """
        if after := self._caller(name).reports.take(count, now):
            raise slower("too many reports a second", after)

    def _caller(self, name: str) -> _Caller:
        a = self._allowance
        if name not in self._callers:
            self._callers[name] = _Caller(
                Bucket(a.requests, BURST_SECONDS * a.requests),
                Bucket(a.reports, BURST_SECONDS * a.reports),
            )
        return self._callers[name]


class AtMost:
    """ASGI middleware: so many requests at once, from whomever; one more is answered 429."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._left = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, unless too many are under way."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._left < 1:
            error = slower("too many requests are under way", 1)
            scope[PROBLEM] = error.slug
            await problem_response(error)(scope, receive, send)
            return
        self._left -= 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._left += 1


def slower(why: str, after: float) -> LocalError:
    """The answer to who exceeds a limit; ``after`` so many seconds it may come again."""
    return LocalError("too-many-requests", why, retry_after=max(1, math.ceil(after)))
