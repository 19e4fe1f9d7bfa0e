"""Fast routes: the same answers and the same metrics as with the framework."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, Field

from riffle.common.process.journal import Journal
from riffle.common.protocol.descriptor import Hex16
from riffle.common.protocol.errors import RemoteError
from riffle.common.server.fast_routes import FastRoutes
from riffle.common.server.monitoring import MetricsMiddleware, RequestMetrics
from riffle.common.server.service import install_problem_handlers, token_of

Token = Annotated[str, token_of("operator")]

ID = "0a" * 16
AUTHORIZED = {"Authorization": "Bearer sesame"}

router = APIRouter()


@router.post("/v1/things/{thing}/parts/{part}")
async def parts(thing: Hex16, part: Hex16, request: Request, token: Token) -> Response:
    """Answers with a given response, or raises a given error."""
    body = (await request.body()).decode()
    if body == "late":
        raise RemoteError("late", "it is over")
    if body == "bug":
        raise ZeroDivisionError("private detail")
    return Response(f"{thing} {part} {token} {body}")


class Asked(BaseModel):
    """A query."""

    wait: float = Field(default=0, ge=0, le=30, description="in seconds")
    state: Literal["open", "closed"] | None = None
    accepting: bool = False


@router.get("/v1/things/{thing}")
async def thing(
    thing: Hex16, request: Request, token: Token, query: Annotated[Asked, Query()]
) -> Response:
    """Answers what it was asked."""
    return Response(f"{thing} {token} {query!r}")


@router.post("/v1/things/{thing}")
async def slow(thing: Hex16, token: Token) -> str:
    """A route on the framework's way."""
    return f"{thing} {token}"


def application(*endpoints: Any) -> tuple[TestClient, CollectorRegistry]:
    app, registry = FastAPI(), CollectorRegistry()
    install_problem_handlers(app, Journal("test"))
    app.add_middleware(FastRoutes, router=router, endpoints=endpoints)
    app.add_middleware(MetricsMiddleware, metrics=RequestMetrics(registry))
    app.include_router(router)
    return TestClient(app, raise_server_exceptions=False), registry


@pytest.fixture
def both() -> Iterator[tuple[tuple[TestClient, CollectorRegistry], ...]]:
    yield application(parts, thing), application()


def noted(registry: CollectorRegistry) -> set[tuple[str, tuple[str, ...], float]]:
    """What was counted, without times."""
    return {
        (sample.name, tuple(sample.labels.values()), sample.value)
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


@pytest.mark.parametrize(
    ("method", "path", "headers", "body"),
    [
        ("POST", f"/v1/things/{ID}/parts/{ID}", AUTHORIZED, "yes"),
        ("POST", f"/v1/things/{ID}/parts/{ID}", AUTHORIZED, "late"),
        ("POST", f"/v1/things/{ID}/parts/{ID}", AUTHORIZED, "bug"),
        ("POST", f"/v1/things/{ID}/parts/{ID}", {}, "yes"),
        ("POST", f"/v1/things/{ID}/parts/{ID}", {"Authorization": "Basic x"}, "yes"),
        ("POST", f"/v1/things/{ID}/parts/{ID}x", AUTHORIZED, "yes"),
        ("POST", f"/v1/things/{ID}/parts/{ID}%0A", AUTHORIZED, "yes"),
        ("POST", f"/v1/things/{ID.upper()}/parts/{ID}", AUTHORIZED, "yes"),
        ("POST", f"/v1/things/{ID}/parts/{ID}/", AUTHORIZED, "yes"),
        ("POST", f"/v1/things/{ID}/parts", AUTHORIZED, "yes"),
        ("GET", f"/v1/things/{ID}/parts/{ID}", AUTHORIZED, None),
        ("POST", f"/v1/things/{ID}", AUTHORIZED, "yes"),
    ],
)
def test_answers_equal_those_of_the_framework(
    both: Any, method: str, path: str, headers: dict[str, str], body: str | None
) -> None:
    answers = []
    for client, registry in both:
        answer = client.request(method, path, headers=headers, content=body, follow_redirects=False)
        answers.append((answer.status_code, answer.text, dict(answer.headers), noted(registry)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "query",
    [
        "",
        "?",
        "?wait=1.5&accepting=1&state=open",
        "?wait=%31&wait=2",
        "?wait=+7&unknown=x",
        "?wait=",
        "?wait=31",
        "?wait=-1",
        "?wait=x",
        "?wait=nan",
        "?wait=inf",
        "?accepting=maybe",
        "?accepting",
        "?state=other",
        "?state=open&state=",
        "?%ff=%ff",
    ],
)
@pytest.mark.parametrize("headers", [AUTHORIZED, {}])
def test_queries_are_read_as_by_the_framework(
    both: Any, query: str, headers: dict[str, str]
) -> None:
    answers = []
    for client, registry in both:
        answer = client.get(f"/v1/things/{ID}{query}", headers=headers)
        answers.append((answer.status_code, answer.text, dict(answer.headers), noted(registry)))
    assert answers[0] == answers[1]


def test_fast_routes_are_documented_like_others(both: Any) -> None:
    documents = [client.get("/openapi.json").json() for client, _ in both]
    assert documents[0] == documents[1]
    described = documents[0]["paths"]["/v1/things/{thing}/parts/{part}"]["post"]
    assert [one["name"] for one in described["parameters"]] == ["thing", "part"]
    assert described["security"]


def test_matching_requests_do_not_reach_the_framework(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the framework was asked")

    monkeypatch.setattr(APIRoute, "handle", refuse)
    (client, _), _ = both
    answer = client.post(f"/v1/things/{ID}/parts/{ID}", headers=AUTHORIZED, content="yes")
    assert (answer.status_code, answer.text) == (200, f"{ID} {ID} sesame yes")
    answer = client.get(f"/v1/things/{ID}?wait=1", headers=AUTHORIZED)
    assert answer.text.startswith(f"{ID} sesame Asked(wait=1.0")
