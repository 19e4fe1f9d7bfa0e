"""Monitoring of both services: metrics and spans of requests, disk space, clock skew.

Metrics are for Prometheus. Their labels come from fixed sets: route templates, statuses and problem
slugs. No label names a node, a user, a lease, a batch or a run. Each app has its own registry, so
each replica reports on itself.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from anyio import BrokenResourceError
from cryptography.x509 import load_pem_x509_certificate
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from riffle.common.process.tracing import set_attributes, span
from riffle.common.protocol.errors import PROBLEMS

PROBLEM_KEY = "riffle.problem"
"""The key in a request's scope for the slug of the problem document that answered the request."""

LATENCY_BUCKETS = (
    *(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""The histogram buckets of every latency, in seconds."""

LEAST_FREE_BYTES = 64 << 20
MOST_SKEW_SECONDS = 30.0
"""This is far below the life of a batch, and far above the error of a clock that is set by NTP."""


def start_at_zero(metric: Counter | Gauge, labels: Iterable[str]) -> None:
    """Exports a series at 0 for each label. Alerts see no increase if a series begins above 0."""
    for label in labels:
        metric.labels(label)


class RequestMetrics:
    """Metrics of one app: its requests, problems, readiness and TLS certificate."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self.requests = counter(
            "riffle_requests", "requests answered", ("method", "route", "status")
        )
        self.seconds = Histogram(
            "riffle_request_seconds",
            "from a request's head to the end of its answer, long polls included",
            ("method", "route"),
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.received = counter("riffle_request_bytes", "bytes of bodies received", ("route",))
        self.problems = counter("riffle_problems", "problem documents answered", ("problem",))
        start_at_zero(self.problems, PROBLEMS)
        gauge = partial(Gauge, registry=registry)
        self.ready = gauge("riffle_ready", "1 if the service is ready, as /readyz says, else 0")
        self._certificate = gauge(
            "riffle_certificate_end_seconds",
            "when the TLS certificate in use ends, seconds since 1970; 0 without TLS",
        )
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram, Counter]] = {}

    def show_certificate(self, file: Path | None) -> None:
        """Exports a PEM certificate's expiry. Ignores a bad file: `service.serve` refuses it."""
        with suppress(OSError, ValueError):
            if file is not None:
                certificate = load_pem_x509_certificate(file.read_bytes())
                self._certificate.set(certificate.not_valid_after_utc.timestamp())

    def observe(
        self, matched: tuple[str, str], status: int, seconds: float, body_bytes: int
    ) -> None:
        """Records a request's method and route, status, seconds, and bytes of the body."""
        method, route = matched
        children = self._children.get((method, route, status))
        if children is None:  # looking up the labels costs as much as all other steps
            children = self._children[method, route, status] = (
                self.requests.labels(method, route, status),
                self.seconds.labels(method, route),
                self.received.labels(route),
            )
        requests, latency, received = children
        requests.inc()
        latency.observe(seconds)
        received.inc(body_bytes)


def matched_route(scope: Scope) -> tuple[str, str] | None:
    """Returns the method and path template of a request's route, or None if there is no route.

    Without a route, the caller chose the texts of method and path, so they must not be logged.
    """
    route, method = scope.get("route"), str(scope["method"])
    if route is None or method not in route.methods:
        return None
    return method, str(route.path)


class MetricsMiddleware:
    """ASGI middleware that fills `RequestMetrics` and opens a span for each request."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and measures it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, body_bytes, status = time.perf_counter(), 0, 500

        async def count_bytes() -> Message:
            nonlocal body_bytes
            message = await receive()
            body_bytes += len(message.get("body", b""))
            return message

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with span("request") as current:
            try:
                await self._app(scope, count_bytes, record_status)
            except Exception as error:
                if (
                    isinstance(error, ExceptionGroup)
                    and error.split(BrokenResourceError)[1] is None
                ):
                    return  # a follower left before all events were sent
                scope[PROBLEM_KEY] = "internal"  # an outer handler answers the error
                raise
            finally:
                route, seconds = matched_route(scope), time.perf_counter() - start
                self._metrics.observe(route or ("none", "none"), status, seconds, body_bytes)
                if (problem := scope.get(PROBLEM_KEY)) is not None:
                    self._metrics.problems.labels(problem).inc()
                set_attributes(current, http__response__status_code=status)
                if route is not None:
                    set_attributes(current, http__request__method=route[0], http__route=route[1])


def metrics_response(*registries: CollectorRegistry) -> Response:
    """Returns registries in the text format that Prometheus reads."""
    text = b"".join(map(generate_latest, registries))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def disk_trouble(folder: Path) -> str | None:
    """Returns what is wrong if a service has too little disk space; None if it has enough."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot look at the data's folder: {error.strerror}"
    if free < LEAST_FREE_BYTES:
        # Strangers may read this, so it does not show the free bytes, which uploads change.
        return f"less than {LEAST_FREE_BYTES >> 20} MiB are free for the data"
    return None


def clock_skew(date: str | None, now: datetime) -> float | None:
    """Returns the seconds by which a peer's clock is ahead of ``now`` (timezone-aware).

    ``date`` is the peer's ``Date`` header. Returns None if the header is missing or malformed.
    """
    if date is None:
        return None
    try:
        return (parsedate_to_datetime(date) - now).total_seconds()
    except (TypeError, ValueError):
        return None


def clock_trouble(skew: float | None) -> str | None:
    """Returns a sentence about a clock skew that is too large, or None if it is allowed or unknown.

    ``skew`` is the number of seconds by which the shuffler's clock is ahead.
    """
    if skew is None or abs(skew) <= MOST_SKEW_SECONDS:
        return None
    which = "ahead of" if skew > 0 else "behind"
    return (
        f"the shuffler's clock is {abs(skew):.0f} s {which} this one, "
        f"{MOST_SKEW_SECONDS:.0f} s are allowed; set the clocks by NTP"
    )


T = TypeVar("T")


class VersionedCache(Generic[T]):
    """A value that is read once per version, however many requests want it at the same time."""

    def __init__(self, read: Callable[[], Awaitable[T]], version: Callable[[], object]) -> None:
        self._read = read
        self._version = version
        self._lock = asyncio.Lock()
        self._cached: tuple[object, T] | None = None

    async def get(self) -> T:
        """Returns the cached value, or reads it again if the version has changed."""
        async with self._lock:
            # Get the version before reading, so a change during the read makes the value stale.
            version = self._version()
            if self._cached is None or self._cached[0] != version:
                self._cached = (version, await self._read())
            return self._cached[1]
