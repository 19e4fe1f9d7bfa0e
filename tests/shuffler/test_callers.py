"""The callers of each route and their rate limits."""

import re
import time
from collections.abc import Iterator

import pytest
from fastapi.routing import APIRoute

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.descriptor import MAX_DESCRIPTOR_BYTES
from riffle.common.protocol.hpke import open_each
from riffle.common.server.limits import CallerLimits, RateLimit, TokenBucket
from riffle.common.server.service import MAX_JSON_BYTES
from riffle.shuffler.app import router
from tests.asgi_probe import CHUNK, bytes_read, known_callers
from tests.common.server.test_limits import (
    limits_of_all_together,
    most_guesses,
    most_of_one_caller,
)
from tests.shuffler.conftest import Api, problem
from tests.shuffler.world import COORDINATOR_TOKEN, OPERATOR_TOKEN, user

ID = "00" * 16
ROUTES = [
    ("PUT", f"/batches/{ID}", {"coordinator"}),
    ("GET", "/batches", {"node"}),
    ("GET", f"/batches/{ID}", {"node"}),
    ("POST", f"/batches/{ID}/leases", {"node"}),
    ("POST", f"/batches/{ID}/declined", {"node"}),
    ("POST", f"/batches/{ID}/reports", {"node"}),
    ("GET", f"/batches/{ID}/status", {"coordinator", "operator"}),
    ("GET", "/deposits", {"coordinator"}),
    ("GET", f"/batches/{ID}/conservation", {"coordinator", "operator"}),
    ("GET", f"/batches/{ID}/messages", {"coordinator"}),
    ("POST", f"/batches/{ID}/acknowledgement", {"coordinator"}),
    ("POST", f"/batches/{ID}/abandon", {"coordinator", "operator"}),
    ("POST", "/nodes", {"operator"}),
    ("GET", "/nodes", {"operator"}),
    ("DELETE", f"/nodes/{ID}", {"operator"}),
]


PUBLIC = {"/v1/identity", "/livez", "/readyz"}


def test_no_route_is_left_out() -> None:
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    found = {
        (method, route.path.replace("{batch_id}", ID).replace("{node_id}", ID))
        for route in routes
        for method in route.methods or ()
        if route.path not in PUBLIC | {"/metrics"}
    }
    assert found == {(method, f"/v1{path}") for method, path, _ in ROUTES}


@pytest.mark.parametrize(("method", "path", "allowed"), ROUTES)
def test_each_route_admits_its_callers_only(
    api: Api, method: str, path: str, allowed: set[str]
) -> None:
    (api.directory / "metrics_hash").write_text(hash_token("reader"))
    api.restart(metrics_token_hash_file=api.directory / "metrics_hash")
    tokens = {
        "reader of metrics": "reader",
        "coordinator": COORDINATOR_TOKEN,
        "operator": OPERATOR_TOKEN,
        "node": api.token,
        "stranger": "guess",
        "nobody": None,
    }
    for who, token in tokens.items():
        status = api.call(method, path, token).status_code
        assert (status != 401) == (who in allowed), (who, status)


def test_openapi_says_whose_token_each_route_takes(api: Api) -> None:
    paths = api.client.get("/openapi.json").json()["paths"]
    said = {
        (method.upper(), re.sub("{.*?}", ID, path.removeprefix("/v1"))): {
            name for each in route.get("security", []) for name in each
        }
        for path, methods in paths.items()
        for method, route in methods.items()
    }
    open_to_all = {("GET", path) for path in ("/identity", "/livez", "/readyz")}
    others = {("GET", "/deposits"): {"coordinator"}, ("GET", "/metrics"): {"operator", "metrics"}}
    known = {(method, path): callers for method, path, callers in ROUTES}
    assert said == known | others | {route: set[str]() for route in open_to_all}


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic abc", "bearer"])
def test_a_malformed_token_is_refused(api: Api, header: str) -> None:
    answer = api.call("GET", "/batches", None, headers={"Authorization": header})
    assert (answer.status_code, problem(answer)) == (401, "unauthorized")


def test_guessing_tokens_is_bounded_and_known_callers_are_admitted(api: Api) -> None:
    state = api.client.app.state  # type: ignore[attr-defined]
    batch = api.deposit()
    assert api.call("GET", "/batches", api.token).status_code == 200
    _, fresh = api.enrol(1)
    state.authenticator.failures._bucket = TokenBucket(rate=0.1, burst=2.0)
    routes = [("GET", "/batches"), ("GET", f"/batches/{ID}/status"), ("POST", "/nodes")]
    answers = [api.call(method, path, "guess") for method, path in routes]
    assert [answer.status_code for answer in answers] == [401, 401, 429]
    assert int(answers[-1].headers["Retry-After"]) >= 1
    assert api.call("GET", "/batches", fresh).status_code == 429, "it may be a guess as well"
    for token, path in {
        api.token: "/batches",
        COORDINATOR_TOKEN: f"/batches/{batch.batch_id}/status",
        OPERATOR_TOKEN: f"/batches/{batch.batch_id}/status",
    }.items():
        assert api.call("GET", path, token).status_code == 200


@pytest.mark.parametrize(
    ("who", "token"), [("coordinator", COORDINATOR_TOKEN), ("operator", OPERATOR_TOKEN)]
)
def test_coordinator_and_operator_have_rate_limits(api: Api, who: str, token: str) -> None:
    batch, state = api.deposit(), api.client.app.state  # type: ignore[attr-defined]
    state.authenticator._limits[who] = CallerLimits(RateLimit(requests=0.1, reports=1.0, at_once=9))
    path = f"/batches/{batch.batch_id}/status"
    answers = [api.call("GET", path, token) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert int(answers[-1].headers["Retry-After"]) >= 1
    other = ({COORDINATOR_TOKEN, OPERATOR_TOKEN} - {token}).pop()
    assert api.call("GET", path, other).status_code == 200


def test_the_limits_that_hold_by_default(api: Api) -> None:
    """Whoever changes one has thought of what a caller may then cost the others."""
    (api.directory / "metrics_hash").write_text(hash_token("reader"))
    api.restart(metrics_token_hash_file=api.directory / "metrics_hash")
    app = api.client.app
    authenticator = app.state.authenticator  # type: ignore[attr-defined]
    limits = authenticator._limits | {"node": api.core.callers}
    assert {who: most_of_one_caller(each) for who, each in limits.items()} == {
        "coordinator": (5_000, 10, 4_096),
        "operator": (2_000, 10, 256),
        "metrics": (2_000, 10, 256),
        "node": (1_000, 50_000, 64),
    }
    assert most_guesses(authenticator.failures) == 1_000
    assert limits_of_all_together(app) == [8_192]


def test_every_route_counts_toward_its_callers_limit(api: Api) -> None:
    """Also toward the limit of guesses, which is one for all routes."""
    api.restart(node_requests=0.01)
    authenticator = api.client.app.state.authenticator  # type: ignore[attr-defined]
    for who in ("coordinator", "operator"):
        authenticator._limits[who] = CallerLimits(RateLimit(0.01, reports=1.0, at_once=9))
    tokens = {"coordinator": COORDINATOR_TOKEN, "operator": OPERATOR_TOKEN, "node": api.token}
    routes = {
        who: [(method, path) for method, path, callers in ROUTES if who in callers]
        for who in tokens
    }
    for who, token in tokens.items():
        while api.call(*routes[who][0], token).status_code != 429:
            pass
        answers = {route: api.call(*route, token).status_code for route in routes[who]}
        assert answers == dict.fromkeys(routes[who], 429), who
    authenticator.failures._bucket = TokenBucket(rate=0.01, burst=1.0)
    while api.call("GET", "/batches", "guess").status_code != 429:
        pass
    guesses = {(method, path): api.call(method, path, "guess") for method, path, _ in ROUTES}
    assert {route for route, answer in guesses.items() if answer.status_code != 429} == set()


@pytest.mark.parametrize("declared", [True, False])
def test_every_body_is_bounded(api: Api, declared: bool) -> None:
    batch, tokens = api.deposit(), {"coordinator": COORDINATOR_TOKEN, "operator": OPERATOR_TOKEN}
    tokens["node"], report = api.token, batch.context.descriptor.report_bytes
    with_body = ("", "/leases", "/declined", "/reports", "/acknowledgement", "/nodes")
    for method, path, callers in ROUTES:
        ending = path.removeprefix(f"/batches/{ID}")
        if ending not in with_body or method not in ("POST", "PUT"):
            continue
        most = {"": MAX_DESCRIPTOR_BYTES, "/reports": 2_048 * (16 + report)}
        size = most.get(ending, MAX_JSON_BYTES) + 1
        body = bytes(size)
        content = body if declared else iter([body[: size // 2], body[size // 2 :]])
        (who,) = callers
        here = path.replace(ID, batch.batch_id)
        answer = api.call(method, here, tokens[who], content=content)
        assert (answer.status_code, problem(answer)) == (413, "too-large"), (method, path)


@pytest.mark.parametrize("n", [4, 8])
def test_an_upload_has_the_operators_largest_size_but_one_report_fits(api: Api, n: int) -> None:
    api.restart(max_upload_bytes=1 << 12)
    long = {"noise_slots": 100} if n == 8 else {}
    batch = api.deposit(n, **long)
    frame = 16 + batch.context.descriptor.report_bytes
    assert (frame > 1 << 12) == bool(long)
    path = f"/batches/{batch.batch_id}/reports"
    sizes = [max(frame, 1 << 12) + more for more in (0, 1)]
    answers = [api.call("POST", path, api.token, content=bytes(size)) for size in sizes]
    assert [answer.status_code == 413 for answer in answers] == [False, True]


def test_every_body_is_refused_before_it_is_all_there(api: Api) -> None:
    batch, tokens = api.deposit(), {"coordinator": COORDINATOR_TOKEN, "operator": OPERATOR_TOKEN}
    tokens["node"], report = api.token, batch.context.descriptor.report_bytes
    most = {"PUT": MAX_DESCRIPTOR_BYTES, "reports": 2_048 * (16 + report)}
    with_body = {"leases", "declined", "reports", "acknowledgement", "nodes"}
    for method, path, callers in ROUTES:
        ending = path.rpartition("/")[2]
        if method != "PUT" and (method != "POST" or ending not in with_body):
            continue
        limit = most.get(method, most.get(ending, MAX_JSON_BYTES))
        here, (who,) = f"/v1{path.replace(ID, batch.batch_id)}", callers
        status, read = bytes_read(api.client, method, here, tokens[who], limit)
        assert status == 413
        assert read <= limit + len(CHUNK), (method, path)


def test_only_a_valid_token_makes_its_caller_known(api: Api) -> None:
    """Connections of known callers have a limit of their own, which strangers must not reach."""
    (api.directory / "metrics_hash").write_text(hash_token("reader"))
    api.restart(metrics_token_hash_file=api.directory / "metrics_hash")
    valid = {"coordinator": COORDINATOR_TOKEN, "operator": OPERATOR_TOKEN, "node": api.token}
    with known_callers(api.client.app) as known:
        for method, path, callers in ROUTES:
            for who, token in {**valid, "reader": "reader", "stranger": "guess"}.items():
                known.clear()
                api.call(method, path, token)
                assert known == [who in callers], (who, method, path)
        for who, token in {**valid, "reader": "reader", "stranger": "guess"}.items():
            known.clear()
            api.client.get("/metrics", headers={"Authorization": f"Bearer {token}"})
            assert known == [who in ("operator", "reader")], who


def test_a_node_leaves_memory_for_the_uploads_of_others(api: Api) -> None:
    api.restart(max_inflight_bytes=1 << 16, max_upload_bytes=1 << 14)
    batch, (_, other) = api.deposit(), api.enrol(10)
    (mine,), (theirs,) = api.leases(batch, [user(0)]), api.leases(batch, [user(1)], other)
    frames = [(lease.lease, batch.report()) for lease in (mine, theirs)]
    with api.core.inflight.meter(api.node_id) as take:
        take(api.settings.inflight_of_a_node)
        refused = api.upload(batch, frames[:1])
        assert (refused.status_code, problem(refused)) == (429, "too-many-requests")
        assert api.outcomes(batch, frames[1:], other) == ["accepted"]
    assert api.outcomes(batch, frames[:1]) == ["accepted"]
    assert api.core.inflight.taken == 0


def test_a_node_that_asks_too_often_is_told_when_to_come_back(api: Api) -> None:
    api.restart(node_requests=0.5)
    statuses = [api.call("GET", "/batches", api.token).status_code for _ in range(6)]
    assert statuses == [200] * 5 + [429]
    slower = api.call("GET", "/batches", api.token)
    assert problem(slower) == "too-many-requests"
    assert 1 <= int(slower.headers["Retry-After"]) <= 2
    _, other = api.enrol(10)
    assert api.call("GET", "/batches", other).status_code == 200


def test_each_node_has_few_requests_under_way(api: Api) -> None:
    api.restart(node_requests_at_once=1)
    _, other = api.enrol(10)
    batch = api.deposit()
    with api.core.callers.request(api.node_id, time.monotonic()):
        for method, path, callers in ROUTES:
            if "node" in callers:
                here = path.replace(ID, batch.batch_id)
                assert problem(api.call(method, here, api.token)) == "too-many-requests"
        assert api.call("GET", "/batches", other).status_code == 200
    assert api.call("GET", "/batches", api.token).status_code == 200


def test_a_node_that_reports_too_fast_loses_no_report(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And costs no elliptic-curve work."""
    opened: list[memoryview] = []

    def opening(private: bytes, info: bytes, sealed: list[memoryview]) -> Iterator[bytes | None]:
        opened.extend(sealed)
        return open_each(private, info, sealed)

    monkeypatch.setattr("riffle.shuffler.core.open_each", opening)
    batch = api.deposit()
    api.restart(node_reports=0.2)
    frames = [(held.lease, batch.report()) for held in api.leases(batch, [user(0), user(1)])]
    slower = [api.upload(batch, [frame]) for frame in (*frames, frames[0])]
    assert [answer.status_code for answer in slower] == [200, 200, 429]
    assert api.status(batch)["reports"] == len(opened) == 2
    assert int(slower[2].headers["Retry-After"]) >= 1
