"""What both services measure alike, for Prometheus: requests by route and status, and problems.

Labels come from fixed sets: route templates, statuses and problem slugs. No label ever names a
node, a user, a lease, a batch or a run. Each app has a registry of its own, so each replica tells
of itself.

What stops a service before it fails: a full disk, a clock that is not its peer's.

Expiries and leases are times of day, so peers must agree on it: a descriptor that one side takes
for open is over for the other. `MOST_SKEW_SECONDS` is far below the shortest useful expiry and far
above what a clock that is kept by NTP is off.

One answer for many who ask at the same time.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from riffle.common.process.tracing import asked

PROBLEM = "riffle.problem"
"""Key of a request's scope: the slug of the problem it was answered with."""

SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets of every latency, in seconds."""


class RequestMetrics:
    """Requests of one app: count, seconds and bytes by route, problems by slug."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "riffle_requests", "requests answered", ("method", "route", "status"), registry=registry
        )
        self.seconds = Histogram(
            "riffle_request_seconds",
            "from a request's head to the end of its answer, long polls included",
            ("method", "route"),
            buckets=SECONDS,
            registry=registry,
        )
        self.received = Counter(
            "riffle_request_bytes", "bytes of bodies received", ("route",), registry=registry
        )
        self.problems = Counter(
            "riffle_problems", "problem documents answered", ("problem",), registry=registry
        )
        self._found: dict[tuple[str, str, int], tuple[Counter, Histogram, Counter]] = {}

    def answered(self, asked: tuple[str, str], status: int, seconds: float, received: int) -> None:
        """Note a request by its method and route, its answer, and the bytes of its body."""
        method, route = asked
        found = self._found.get((method, route, status))
        if found is None:  # to find one by its labels costs as much as all else here
            found = self._found[method, route, status] = (
                self.requests.labels(method, route, status),
                self.seconds.labels(method, route),
                self.received.labels(route),
            )
        requests, spent, bytes_ = found
        requests.inc()
        spent.observe(seconds)
        bytes_.inc(received)


class Measured:
    """ASGI middleware that fills `RequestMetrics`."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and measure it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, received, status = time.perf_counter(), 0, 500

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except Exception:
            scope[PROBLEM] = (
                "internal"  # answered further out, by the handler of what nobody expects
            )
            raise
        finally:
            self._note(scope, status, received, time.perf_counter() - began)

    def _note(self, scope: Scope, status: int, received: int, seconds: float) -> None:
        self._metrics.answered(asked(scope) or ("none", "none"), status, seconds, received)
        if (problem := scope.get(PROBLEM)) is not None:
            self._metrics.problems.labels(problem).inc()


def note_problem(request: Request, slug: str) -> None:
    """Say which problem a request is answered with."""
    request.scope[PROBLEM] = slug


def exposition(registry: CollectorRegistry) -> Response:
    """A registry as Prometheus reads it."""
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


LEAST_FREE_BYTES = 64 << 20
MOST_SKEW_SECONDS = 30.0


def disk_trouble(folder: Path) -> str | None:
    """What is wrong with the space for a service's data; None: nothing."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot look at {folder}: {error.strerror}"
    if free < LEAST_FREE_BYTES:
        return f"{free >> 20} MiB are free for the data, {LEAST_FREE_BYTES >> 20} are needed"
    return None


def skew(date: str | None, now: datetime) -> float | None:
    """Seconds that a peer's clock, by its ``Date`` header, is ahead of ``now`` (aware); None: it
    does not say. The header has whole seconds."""
    if date is None:
        return None
    try:
        return (parsedate_to_datetime(date) - now).total_seconds()
    except (TypeError, ValueError):
        return None


def clock_trouble(ahead: float | None) -> str | None:
    """What is wrong with a clock that a peer's is ``ahead`` of, in seconds; None: nothing."""
    if ahead is None or abs(ahead) <= MOST_SKEW_SECONDS:
        return None
    which = "ahead of" if ahead > 0 else "behind"
    return (
        f"the shuffler's clock is {abs(ahead):.0f} s {which} this one, "
        f"{MOST_SKEW_SECONDS:.0f} s are allowed; set the clocks by NTP"
    )


T = TypeVar("T")


class Shared(Generic[T]):
    """What was read under the present key: read again only when the key has changed."""

    def __init__(self, read: Callable[[], Awaitable[T]], key: Callable[[], object]) -> None:
        self._read = read
        self._key = key
        self._lock = asyncio.Lock()
        self._held: tuple[object, T] | None = None

    async def get(self) -> T:
        """The answer under the present key."""
        async with self._lock:
            key = self._key()  # taken before reading: what changes meanwhile makes it stale
            if self._held is None or self._held[0] != key:
                self._held = (key, await self._read())
            return self._held[1]
