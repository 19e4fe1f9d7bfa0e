"""A service's answers when something is wrong."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from inspect import isasyncgenfunction, iscoroutinefunction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from fastapi.testclient import TestClient
from pydantic import BaseModel

from riffle.common.process.endpoint import hash_token
from riffle.common.process.journal import Journal
from riffle.common.protocol.errors import PROBLEMS, URN, LocalError, RemoteError, problem_slug
from riffle.common.server.limits import Authenticator, Credential, FailedAttempts, RateLimit
from riffle.common.server.service import hold, install_problem_handlers, read_body, token_of
from riffle.coordinator import app as coordinator_app
from riffle.coordinator.api import operations, results, runs
from riffle.shuffler import app as shuffler_app

Token = Annotated[str, token_of("operator")]

OPERATOR = RateLimit(requests=9.0, reports=1.0, at_once=9)


class Item(BaseModel):
    size: int


def application() -> FastAPI:
    app = FastAPI()
    install_problem_handlers(app, Journal("test"))

    @app.post("/items")
    def items(item: Item) -> int:
        return item.size

    @app.post("/body")
    async def body(request: Request) -> int:
        return len(await read_body(request, 10))

    @app.get("/secret")
    def secret(token: Token) -> str:
        credentials = {"me": Credential(hash_token("sesame"), OPERATOR)}
        with Authenticator(FailedAttempts(), credentials).authenticate(token, "me"):
            return "in"

    @app.get("/busy")
    def busy() -> None:
        raise LocalError("unavailable", "the store is full", retry_after=7)

    @app.get("/bug")
    @app.get("/bugs/{name}")
    def bug(name: str = "") -> None:
        raise ZeroDivisionError("private detail")

    return app


@pytest.fixture
def client() -> TestClient:
    return TestClient(application(), raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("method", "path", "options", "slug"),
    [
        ("POST", "/items", {"json": {}}, "malformed"),
        ("POST", "/items", {"content": b"{"}, "malformed"),
        ("POST", "/body", {"content": b"x" * 11}, "too-large"),
        ("GET", "/nothing", {}, "not-found"),
        ("PUT", "/items", {}, "method-not-allowed"),
        ("GET", "/secret", {}, "unauthorized"),
        ("GET", "/secret", {"headers": {"Authorization": "Basic sesame"}}, "unauthorized"),
        ("GET", "/secret", {"headers": {"Authorization": "Bearer wrong"}}, "unauthorized"),
        ("GET", "/busy", {}, "unavailable"),
        ("GET", "/bug", {}, "internal"),
    ],
)
def test_every_fault_is_a_problem_document(
    client: TestClient, method: str, path: str, options: dict[str, object], slug: str
) -> None:
    answer = client.request(method, path, **options)  # type: ignore[arg-type]
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["type"] == URN + slug
    assert document["status"] == answer.status_code == PROBLEMS[slug][0]
    assert "private detail" not in answer.text
    assert problem_slug(document) == slug


def test_an_unexpected_error_is_logged_by_its_type_and_route(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert client.get("/bugs/somebody").status_code == 500
    (line,) = [json.loads(r.getMessage()) for r in caplog.records if r.name == "riffle.test"]
    place = line.pop("where").split()[-1]
    assert line == {
        "event": "unexpected-error",
        "error": "ZeroDivisionError",
        "method": "GET",
        "route": "/bugs/{name}",
    }
    assert place.startswith("server/test_service.py:")
    assert "somebody" not in caplog.text
    assert "private detail" not in caplog.text


def test_good_requests_pass(client: TestClient) -> None:
    assert client.post("/items", json={"size": 3}).json() == 3
    assert client.post("/body", content=b"x" * 10).json() == 10
    assert client.get("/secret", headers={"Authorization": "Bearer sesame"}).json() == "in"


def test_retry_after_is_sent(client: TestClient) -> None:
    assert client.get("/busy").headers["retry-after"] == "7"


def test_a_foreign_problem_document_is_internal() -> None:
    assert problem_slug({"type": "about:blank"}) == "internal"
    assert RemoteError("late", "over").document()["title"] == PROBLEMS["late"][1]


def test_errors_survive_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(RemoteError("late", "over")))  # noqa: S301
    assert (type(error), error.slug, str(error)) == (RemoteError, "late", "over")


def needed(dependant: Dependant) -> Iterator[Dependant]:
    """Yields the dependencies of a route, and their own."""
    for each in dependant.dependencies:
        yield each
        yield from needed(each)


@pytest.mark.parametrize(
    "router",
    [
        shuffler_app.router,
        runs.router,
        results.router,
        operations.keys_router,
        operations.health_router,
    ],
)
def test_routes_that_await_nothing_use_no_thread(router: APIRouter) -> None:
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    called = {each.call for route in routes for each in needed(route.dependant)}
    plain = [
        call
        for call in called
        if not (
            isasyncgenfunction(call) or iscoroutinefunction(call) or isinstance(call, HTTPBearer)
        )
    ]
    assert called
    assert plain == []


def test_refusals_name_the_scheme_and_the_allowed_methods() -> None:
    client = TestClient(application())
    unknown, wrong = client.get("/secret"), client.put("/secret")
    assert (unknown.status_code, unknown.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "GET")


def test_a_sqlite_file_serves_one_process(tmp_path: Path) -> None:
    """Two services on one file would each miss what the other one changes."""
    url = f"sqlite:///{tmp_path / 'a.sqlite'}"
    program = "import sys; from riffle.common.server.service import hold; hold(sys.argv[1])"
    holding = f"{program}; print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", holding, url]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(LocalError, match="another process serves it"):
            hold(url)
        other.stdin.close()
    hold(url)
    hold(url)  # this process may open its own file again


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "postgresql:///x"])
def test_what_is_no_file_needs_no_lock(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hold(url)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_locked_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be used: No such file") as caught:
        hold(f"sqlite:///{tmp_path}/nowhere/a.sqlite")
    assert caught.value.slug == "unavailable"


@pytest.mark.parametrize("module", [shuffler_app, coordinator_app], ids=["shuffler", "coordinator"])
def test_a_service_holds_its_store_before_it_serves(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    settings: Any = SimpleNamespace(url="sqlite:///s", data_dir=tmp_path, tls=lambda: None)
    app = SimpleNamespace(state=None)
    monkeypatch.setattr(module, "create_app", lambda _: app)
    monkeypatch.setattr(module, "hold", done.append)
    monkeypatch.setattr(module, "serve", lambda *_: done.append("serves"))
    if module is shuffler_app:
        monkeypatch.setattr(module, "preflight", lambda _: None)
    module.run(settings)
    assert done == ["sqlite:///s", "serves"]
