"""Which route a request is for: what may be told of it where no asker's own words may stand.

Traces for whoever has a collector: OpenTelemetry over OTLP/HTTP, off unless configured.

On when the environment names a collector (``OTEL_EXPORTER_OTLP_ENDPOINT``, OpenTelemetry's own
variable) and the extra ``riffle-rl[tracing]`` is installed. Spans: request, seal, permute, store,
fetch, open, plan. What a span may carry is on an allow-list, and nothing on it names a node, a
user, a lease, a batch or a run. No trace crosses from one service to another: ``traceparent`` is
neither sent nor read, since a trace that begins at a node and ends at the coordinator would undo
the shuffle. A shuffler's traces have the times of single uploads, as its metrics do: they are for
its own operator only.
"""

import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from riffle.common.protocol.errors import LocalError


def asked(scope: Scope) -> tuple[str, str] | None:
    """Method and template of a request's route.

    None: it has no such address, or none with this method; both could be anything then.
    """
    route, method = scope.get("route"), str(scope["method"])
    if route is None or method not in route.methods:
        return None
    return method, str(route.path)


if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

P = ParamSpec("P")
T = TypeVar("T")

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
ALLOWED = frozenset({"http.request.method", "http.route", "http.response.status_code"})

_tracer: "Tracer | None" = None


@contextmanager
def collecting(service: str) -> Iterator[None]:
    """Send spans of ``service`` to the collector that the environment names, if it names one.

    Raises:
        LocalError: ``invalid-spec``: it names one and the extra is not installed.
    """
    if not any(os.environ.get(name) for name in VARIABLES):
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise LocalError(
            "invalid-spec", f"{VARIABLES[0]} needs the extra riffle-rl[tracing]: {error}"
        ) from error
    # Not `Resource.create`: it would add this machine's name, process and command line.
    provider = TracerProvider(resource=Resource({"service.name": f"riffle-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        with using(provider):
            yield
    finally:
        provider.shutdown()


@contextmanager
def using(provider: "TracerProvider") -> Iterator[None]:
    """Give spans to a provider while the context lasts."""
    global _tracer  # noqa: PLW0603 -- a process has one, as it has one log
    before, _tracer = _tracer, provider.get_tracer("riffle")
    try:
        yield
    finally:
        _tracer = before


@contextmanager
def span(name: str) -> Iterator["Span | None"]:
    """A span while the context lasts. What went wrong inside is not written into it."""
    if _tracer is None:
        yield None
        return
    with _tracer.start_as_current_span(
        name, record_exception=False, set_status_on_exception=False
    ) as current:
        yield current


def traced(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function, or a coroutine function, with a span."""

    def decorate(work: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(work)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return work(*args, **kwargs)

        @functools.wraps(work)
        async def call_async(*args: P.args, **kwargs: P.kwargs) -> object:
            with span(name):
                return await cast("Awaitable[object]", work(*args, **kwargs))

        return cast("Callable[P, T]", call_async) if inspect.iscoroutinefunction(work) else call

    return decorate


def note(current: "Span | None", **attributes: str | int) -> None:
    """Attributes of a span, dots written as ``__``.

    Raises:
        ValueError: one is not on the allow-list: a mistake of ours, caught by the tests.
    """
    named = {name.replace("__", "."): value for name, value in attributes.items()}
    if unknown := sorted(named.keys() - ALLOWED):
        raise ValueError(f"attributes {unknown} may not be traced")
    if current is not None:
        current.set_attributes(named)


class Traced:
    """ASGI middleware: a span a request, by its route's template."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on within a span."""
        if scope["type"] != "http" or _tracer is None:
            await self._app(scope, receive, send)
            return
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with span("request") as current:
            try:
                await self._app(scope, receive, noted)
            finally:
                note(current, http__response__status_code=status)
                if (known := asked(scope)) is not None:
                    note(current, http__request__method=known[0], http__route=known[1])
