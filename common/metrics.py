"""What both services measure alike, for Prometheus: requests by route and status, and problems.

Labels come from fixed sets: route templates, statuses and problem slugs. No label ever names a
node, a user, a lease, a batch or a run. Each app has a registry of its own, so each replica tells
of itself.
"""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from riffle.common.routes import asked

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
