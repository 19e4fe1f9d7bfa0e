"""Traces for operators who run a collector: OpenTelemetry over OTLP/HTTP.

Tracing is on if ``OTEL_EXPORTER_OTLP_ENDPOINT``, OpenTelemetry's own variable, names a collector.
It needs the extra ``riffle-rl[tracing]``. Attributes of spans come from an allow-list; no attribute
names a node, a user, a lease, a batch or a run.

No service sends or reads ``traceparent``: a trace from a node to the coordinator would undo the
shuffle. A shuffler's traces show when single uploads arrived, so only its operator may see them.
"""

import functools
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from riffle.common.protocol.errors import LocalError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

P = ParamSpec("P")
T = TypeVar("T")
AsyncFunction = Callable[P, Coroutine[Any, Any, T]]

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
ALLOWED = frozenset({"http.request.method", "http.route", "http.response.status_code"})

_tracer: "Tracer | None" = None


@contextmanager
def export_spans(service: str) -> Iterator[None]:
    """Sends the spans of ``service`` to a collector, if the environment names one.

    Raises LocalError ``invalid-spec`` if the extra is needed but not installed.
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
        detail = f"{VARIABLES[0]} needs the extra riffle-rl[tracing]: {error}"
        raise LocalError("invalid-spec", detail) from error
    # Not `Resource.create`: it would add this machine's name, process and command line.
    provider = TracerProvider(resource=Resource({"service.name": f"riffle-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        with use_provider(provider):
            yield
    finally:
        provider.shutdown()


@contextmanager
def use_provider(provider: "TracerProvider") -> Iterator[None]:
    """Records spans with a provider while the context lasts."""
    global _tracer  # noqa: PLW0603 -- one for the process, like its log
    previous, _tracer = _tracer, provider.get_tracer("riffle")
    try:
        yield
    finally:
        _tracer = previous


@contextmanager
def span(name: str) -> Iterator["Span | None"]:
    """Opens a span for a ``with`` block. The span does not record errors raised in the block."""
    if _tracer is None:
        yield None
        return
    with _tracer.start_as_current_span(
        name, record_exception=False, set_status_on_exception=False
    ) as current:
        yield current


def in_span(name: str) -> Callable[[AsyncFunction[P, T]], AsyncFunction[P, T]]:
    """Returns a decorator that runs a coroutine function in a span. Plain functions use `span`."""

    def decorate(work: AsyncFunction[P, T]) -> AsyncFunction[P, T]:
        @functools.wraps(work)
        async def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return await work(*args, **kwargs)

        return call

    return decorate


def set_attributes(current: "Span | None", **attributes: str | int) -> None:
    """Sets attributes: ``a__b`` sets ``a.b``. Raises ValueError for an attribute not in ALLOWED."""
    named = {name.replace("__", "."): value for name, value in attributes.items()}
    if unknown := sorted(named.keys() - ALLOWED):
        raise ValueError(f"attributes {unknown} may not be traced")
    if current is not None:
        current.set_attributes(named)
