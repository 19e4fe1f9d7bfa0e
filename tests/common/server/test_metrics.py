"""Metrics of requests, as Prometheus reads them."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from riffle.common.process.journal import Journal
from riffle.common.protocol.errors import RemoteError
from riffle.common.server.monitoring import MetricsMiddleware, RequestMetrics, metrics_response
from riffle.common.server.service import install_problem_handlers


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

    return TestClient(app, raise_server_exceptions=False)


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
