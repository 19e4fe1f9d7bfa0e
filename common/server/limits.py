"""Authentication of callers and their limits: token buckets, rate limits, concurrent requests.

A request beyond a limit is refused at once, with the time after which its caller may try again.

All failed authentications share one bucket, because each costs a lookup. While the bucket is empty,
only tokens that were valid before are looked up. So a guesser cannot keep out a known caller.
"""

import hmac
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, params
from starlette.types import ASGIApp, Receive, Scope, Send

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.service import problem_answer, token_of

BURST_SECONDS = 10.0

FAILURES_PER_SECOND = 100.0
"""Failed attempts of all callers: at most this many a second, and ten times this many at once."""


@dataclass(slots=True)
class TokenBucket:
    """A bucket that gains ``rate`` tokens a second, up to ``burst``."""

    rate: float
    burst: float
    _tokens: float = math.nan
    _at: float = 0.0

    def take(self, amount: float, now: float) -> float:
        """Takes ``amount`` and returns 0, or takes nothing and returns the seconds to wait.

        ``now`` is in seconds. A full bucket grants any ``amount``; its tokens may then be negative.
        """
        saved = self.burst if math.isnan(self._tokens) else self._tokens
        self._tokens = min(self.burst, saved + max(0.0, now - self._at) * self.rate)
        self._at = now
        short = min(amount, self.burst) - self._tokens
        if short > 0:
            return short / self.rate
        self._tokens -= amount
        return 0.0

    def give_back(self, amount: float) -> None:
        """Puts back tokens that were not used."""
        self._tokens = min(self.burst, self._tokens + amount)


def _bucket(rate: float) -> TokenBucket:
    return TokenBucket(rate, BURST_SECONDS * rate)


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The limit of one caller: requests and reports per second, and concurrent requests."""

    requests: float
    reports: float
    at_once: int


@dataclass(frozen=True, slots=True)
class Credential:
    """The hash of a caller's token, the caller's limit, and the file with the token in clear.

    A refusal names ``file``, which is in the folder that ``riffle network init`` makes.
    """

    token_hash: str
    limit: RateLimit
    file: str = ""


def too_many_requests(reason: str, seconds: float) -> LocalError:
    """Returns the error for a caller beyond a limit, who may retry after ``seconds``."""
    return LocalError("too-many-requests", reason, retry_after=max(1, math.ceil(seconds)))


@dataclass(slots=True)
class _CallerState:
    requests: TokenBucket
    reports: TokenBucket
    under_way: int = 0


class CallerLimits:
    """Applies the same limit to each of a few authenticated callers, known by their names."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._callers = defaultdict[str, _CallerState](
            lambda: _CallerState(_bucket(limit.requests), _bucket(limit.reports))
        )

    @contextmanager
    def request(self, name: str, now: float) -> Iterator[None]:
        """Counts a caller's request until it ends, or raises LocalError ``too-many-requests``."""
        caller = self._callers[name]
        if caller.under_way >= self._limit.at_once:
            raise too_many_requests(f"{caller.under_way} requests of this caller are under way", 1)
        if wait := caller.requests.take(1, now):
            raise too_many_requests("too many requests a second", wait)
        caller.under_way += 1
        try:
            yield
        finally:
            caller.under_way -= 1

    def reports(self, name: str, count: int, now: float) -> None:
        """Counts reports before they are read, or raises LocalError ``too-many-requests``."""
        if wait := self._callers[name].reports.take(count, now):
            raise too_many_requests("too many reports a second", wait)


class FailedAttempts:
    """Limits the rate of failed authentications. ``clock`` returns seconds."""

    def __init__(
        self, rate: float = FAILURES_PER_SECOND, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = _bucket(rate)
        self._known: set[str] = set()  # hashes of valid tokens only, so the set is bounded
        self._clock = clock

    @contextmanager
    def attempt(self, token: str) -> Iterator[None]:
        """Opens a context for the code that checks ``token``.

        The code must raise RemoteError ``unauthorized`` if the token is not valid. After too many
        failures, the context raises LocalError ``too-many-requests`` for an unknown token.
        """
        name = hash_token(token)
        known = name in self._known
        if not known and (wait := self._bucket.take(1, self._clock())):
            raise too_many_requests("too many tokens that are not valid", wait)
        try:
            yield
        except Exception as error:
            if isinstance(error, RemoteError) and error.slug == "unauthorized":
                self._known.discard(name)  # from now on, a revoked token counts as unknown
            elif not known:
                self._bucket.give_back(1)
            raise
        if not known:
            self._bucket.give_back(1)
            self._known.add(name)


class Authenticator:
    """Recognizes callers by the hashes of their tokens, and applies their limits."""

    def __init__(self, failures: FailedAttempts, credentials: Mapping[str, Credential]) -> None:
        self.failures = failures
        self._credentials = dict(credentials)
        self._limits = {name: CallerLimits(each.limit) for name, each in credentials.items()}

    @contextmanager
    def authenticate(self, token: str, *names: str) -> Iterator[str]:
        """Yields the first caller of ``names`` who owns the token, and applies the caller's limit.

        Raises RemoteError ``unauthorized`` or LocalError ``too-many-requests``.
        """
        with self.failures.attempt(token):
            name = self._owner(hash_token(token), names)
        with self._limits[name].request(name, time.monotonic()):
            yield name

    def _owner(self, token_hash: str, names: tuple[str, ...]) -> str:
        """Returns the token's owner. Compares all hashes, each in constant time."""
        known = [(n, self._credentials[n].token_hash) for n in names if n in self._credentials]
        owners = [name for name, each in known if hmac.compare_digest(token_hash, each)]
        if not owners:
            files = " or ".join(self._credentials[name].file for name, _ in known)
            hint = f"; the network's folder has the right one in {files}" if files else ""
            raise RemoteError("unauthorized", f"this token is not valid here{hint}")
        return owners[0]


@contextmanager
def caller_of(request: Request, token: str, *names: str) -> Iterator[str]:
    """Yields the caller as the app's `Authenticator` does, and notes that the caller is known."""
    with request.app.state.authenticator.authenticate(token, *names) as name:
        request.state.known = True
        yield name


def only(*names: str) -> params.Depends:
    """Returns a FastAPI dependency. It yields the first caller in ``names`` who owns the token."""

    async def caller(
        request: Request, token: Annotated[str, token_of(*names)]
    ) -> AsyncIterator[str]:
        with caller_of(request, token, *names) as name:
            yield name

    dependency: params.Depends = Depends(caller)
    return dependency


class ConcurrencyLimit:
    """ASGI middleware that answers 429 while ``limit`` requests are under way."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._free = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._free < 1:
            error = too_many_requests("too many requests are under way", 1)
            await problem_answer(scope, error)(scope, receive, send)
            return
        self._free -= 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._free += 1
