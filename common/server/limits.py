"""How much one caller, and all of them together, may ask for at a time. Pure but for `AtMost`.

Who exceeds a limit is told at once, and when to come back: waiting here would only move the queue.

Who may come in: callers known by the hash of their token, each within limits; strangers too.

A token that opens nothing costs a look at the store, or at nothing, and could be tried without end.
So all strangers together have one bucket. While it is empty, tokens that were valid before are
looked up as ever, and all others are told to come back: who guesses does not keep out who is known.
"""

import hmac
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.monitoring import PROBLEM
from riffle.common.server.service import problem_response


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


STRANGERS = 100.0
"""Failed authentications a second, of all callers together; ten seconds' worth at once."""


@dataclass(frozen=True, slots=True)
class Key:
    """The hash of a caller's token, what it may ask for, and the file of the token in clear.

    ``file`` is that of ``riffle network init``, below the network's folder, to tell who is refused.
    """

    token_hash: str
    allowance: Allowance
    file: str = ""


class Strangers:
    """The bucket of failed authentications. ``clock`` returns seconds."""

    def __init__(
        self, rate: float = STRANGERS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = Bucket(rate, BURST_SECONDS * rate)
        self._known: set[str] = set()  # hashes, of valid tokens only: as many as there are
        self._clock = clock

    @contextmanager
    def knock(self, token: str) -> Iterator[None]:
        """Around the check of a token, which raises ``unauthorized`` when it opens nothing.

        Raises:
            LocalError: ``too-many-requests``: the token was not looked at.
        """
        name = hash_token(token)
        stranger = name not in self._known
        if stranger and (after := self._bucket.take(1, self._clock())):
            raise slower("too many tokens that are not valid", after)
        try:
            yield
        except Exception as error:
            if isinstance(error, RemoteError) and error.slug == "unauthorized":
                self._known.discard(name)  # revoked: from now on a stranger's
            elif stranger:
                self._bucket.give(1)
            raise
        if stranger:
            self._bucket.give(1)
            self._known.add(name)


class Doors:
    """Callers whose tokens are in the settings, by name."""

    def __init__(self, strangers: Strangers, keys: Mapping[str, Key]) -> None:
        self._strangers = strangers
        self._keys = dict(keys)
        self._callers = {name: Callers(key.allowance) for name, key in keys.items()}

    @contextmanager
    def enter(self, token: str, *names: str) -> Iterator[str]:
        """Which of these callers it is, the first that fits, while its request lasts.

        Raises:
            RemoteError: ``unauthorized``, none of them.
            LocalError: ``too-many-requests``.
        """
        with self._strangers.knock(token):
            name = self._whose(hash_token(token), names)
        with self._callers[name].request(name, time.monotonic()):
            yield name

    def _whose(self, given: str, names: tuple[str, ...]) -> str:
        """Compared in constant time, with all of them."""
        known = [(name, self._keys[name].token_hash) for name in names if name in self._keys]
        found = [name for name, each in known if hmac.compare_digest(given, each)]
        if not found:
            files = " or ".join(self._keys[name].file for name, _ in known)
            hint = f"; the network's folder has the right one in {files}" if files else ""
            raise RemoteError("unauthorized", f"this token is not valid here{hint}")
        return found[0]
