"""Traces: what a span holds and never holds, and their export to a collector."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from riffle.common.process.journal import Journal
from riffle.common.process.tracing import (
    VARIABLES,
    export_spans,
    in_span,
    set_attributes,
    span,
    use_provider,
)
from riffle.common.protocol.errors import RemoteError
from riffle.common.server.monitoring import MetricsMiddleware, RequestMetrics
from riffle.common.server.service import make_app


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    result, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(result))
    with use_provider(provider):
        yield result
    provider.shutdown()


def test_without_a_collector_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with export_spans("test"), span("x") as current:
        assert current is None


def test_functions_and_coroutines_run_in_spans(exporter: InMemorySpanExporter) -> None:
    @in_span("outer")
    async def outer() -> int:
        return await asyncio.to_thread(inner)

    @span("inner")
    def inner() -> int:
        return 7

    assert asyncio.run(outer()) == 7
    first, second = exporter.get_finished_spans()
    assert (first.name, second.name) == ("inner", "outer")
    assert first.parent is not None and second.context is not None
    assert first.parent.span_id == second.context.span_id


def test_spans_do_not_record_errors(exporter: InMemorySpanExporter) -> None:
    @span("work")
    def work() -> None:
        raise RemoteError("late", "SECRET")

    with pytest.raises(RemoteError):
        work()
    assert "SECRET" not in exporter.get_finished_spans()[0].to_json()


def test_attributes_off_the_allow_list_are_refused(exporter: InMemorySpanExporter) -> None:
    with span("x") as current, pytest.raises(ValueError, match="node"):
        set_attributes(current, node="ab")


def carried(result: ReadableSpan) -> set[str]:
    return set(result.attributes or {})


def test_spans_of_requests_have_their_route(exporter: InMemorySpanExporter) -> None:
    app = FastAPI()
    app.add_middleware(MetricsMiddleware, metrics=RequestMetrics(CollectorRegistry()))

    @app.get("/users/{name}")
    async def show(name: str) -> str:
        return name

    client = TestClient(app)
    client.get("/users/alice?x=alice", headers={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
    client.get("/alice")
    client.request("ALICE", "/users/alice")
    first, second, third = exporter.get_finished_spans()
    assert dict(first.attributes or {}) == {
        "http.route": "/users/{name}",
        "http.request.method": "GET",
        "http.response.status_code": 200,
    }
    assert carried(second) == carried(third) == {"http.response.status_code"}
    text = first.to_json() + second.to_json() + third.to_json().lower()
    assert "alice" not in text and "ab" * 16 not in text, "nor does a trace go on from a caller's"


def test_the_framework_exports_no_spans_of_its_own(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would hold paths, and go to whichever collector the environment names."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    metrics = RequestMetrics(CollectorRegistry())
    app = make_app("test", Journal("test"), metrics, lambda _: nullcontext(), (), ())
    assert TestClient(app).get("/users/alice").status_code == 404
    (ours,) = exporter.get_finished_spans()
    assert carried(ours) == {"http.response.status_code"}
    provider.shutdown()


def test_a_collector_receives_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real exporter to a collector's stub on loopback."""
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with export_spans("test"), span("permute"):
            pass
        server.shutdown()
        thread.join()
    path, body = got[0]
    assert path == "/v1/traces"
    assert b"riffle-test" in body and b"permute" in body
