"""Metrics of requests, as Prometheus reads them."""

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from riffle.common.process.journal import Journal
from riffle.common.protocol.errors import RemoteError
from riffle.common.server.monitoring import MetricsMiddleware, RequestMetrics, metrics_response
from riffle.common.server.service import install_problem_handlers, read_body


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def client(registry: CollectorRegistry) -> TestClient:
    app = FastAPI()
    install_problem_handlers(app, Journal("test"))
    app.add_middleware(MetricsMiddleware, metrics=RequestMetrics(registry))

    @app.post("/users/{user}")
    async def user(user: str, body: dict[str, int]) -> str:
        if user == "late":
            raise RemoteError("late", "too late")
        if user == "bug":
            raise ZeroDivisionError
        return user

    @app.post("/read")
    async def read(request: Request) -> int:
        return len(await read_body(request, 100))

    return TestClient(app, raise_server_exceptions=False)


def hang_up(client: TestClient, path: str) -> None:
    """Sends half of a body and disconnects."""
    messages = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(_: object) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    asyncio.run(client.app(scope, receive, send))  # type: ignore[arg-type]


def test_a_client_that_hangs_up_in_a_body_is_no_error_of_the_server(
    client: TestClient, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    hang_up(client, "/read")
    labels = {"method": "POST", "route": "/read"}
    assert value(registry, "riffle_requests_total", **labels, status="400") == 1
    assert value(registry, "riffle_problems_total", problem="internal") == 0
    assert "unexpected-error" not in caplog.text


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_requests_count_under_their_route(client: TestClient, registry: CollectorRegistry) -> None:
    client.post("/users/alice", json={})
    client.post("/users/late", json={"a": 1})
    client.post("/users/bug", json={})
    client.get("/users/alice/etc/passwd")
    route = {"method": "POST", "route": "/users/{user}"}
    assert value(registry, "riffle_requests_total", **route, status="200") == 1
    assert value(registry, "riffle_requests_total", **route, status="410") == 1
    assert value(registry, "riffle_requests_total", **route, status="500") == 1
    nowhere = {"method": "none", "route": "none", "status": "404"}
    assert value(registry, "riffle_requests_total", **nowhere) == 1
    assert value(registry, "riffle_request_seconds_count", **route) == 3
    assert value(registry, "riffle_request_bytes_total", route="/users/{user}") == 11
    for problem in ("late", "internal", "not-found"):
        assert value(registry, "riffle_problems_total", problem=problem) == 1


def test_no_label_comes_from_the_caller(client: TestClient, registry: CollectorRegistry) -> None:
    client.post("/users/alice?token=alice", json={"x": 1}, headers={"X": "alice"})
    client.request("ALICE", "/alice")
    client.request("ALICE", "/users/bob")
    assert "alice" not in bytes(metrics_response(registry).body).decode().lower()
