"""The service put together: health, limits, its description."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import create_engine

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import KeyPair
from riffle.common.server.limits import Authenticator, Credential, FailedAttempts, RateLimit
from riffle.coordinator.app import create_app
from riffle.coordinator.batches.analyzer import Analyzer
from tests.asgi_probe import CHUNK, bytes_read, known_callers
from tests.common.server.test_limits import (
    limits_of_all_together,
    most_guesses,
    most_of_one_caller,
)
from tests.coordinator.calls import Api, problem
from tests.coordinator.world import RUN, SHUFFLER_ID, SMALL, TOKEN, one_key, settings

OK = {"store": "ok", "analyzer": "ok", "clock": "ok", "disk": "ok"}


def test_health_names_what_is_missing(api: Api) -> None:
    assert api.client.get("/livez").status_code == 200
    ready = api.client.get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {**OK, "shuffler": "ok"})
    api.shuffler.down = 1
    api.clock = lambda: time.time() + 1
    ready = api.client.get("/readyz")
    assert ready.status_code == 503
    assert "does not answer" in ready.json()["shuffler"]


def test_readiness_is_read_once_a_second_for_all_callers(api: Api) -> None:
    for now in (1_800_000_000, 1_800_000_001):
        api.clock = partial(float, now)
        before = api.shuffler.calls.count("identity")
        assert {api.client.get("/readyz").status_code for _ in range(9)} == {200}
        assert api.shuffler.calls.count("identity") == before + 1


def test_health_names_a_clock_that_is_off_and_a_full_disk(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.shuffler.skew = -45.0
    monkeypatch.setattr("riffle.common.server.monitoring.disk_trouble", lambda _: "1 MiB free")
    ready = api.client.get("/readyz")
    readiness = ready.json()
    assert (ready.status_code, readiness["disk"], readiness["store"]) == (503, "1 MiB free", "ok")
    assert "45 s behind" in readiness["clock"]


PUBLIC = {"/livez", "/readyz"}


def routes(api: Api) -> list[tuple[str, str]]:
    """Every route that needs a token, with ids of nothing that exists."""
    described = api.client.get("/openapi.json").json()["paths"]
    found = [
        (method.upper(), re.sub(r"{\w+_id}", "0" * 32, path).replace("{index}", "0"))
        for path in described
        if path not in PUBLIC
        for method in described[path]
    ]
    assert len(found) > 20
    return found


def answers(api: Api, token: str | None) -> dict[tuple[str, str], int]:
    """The status of every route's answer to a token."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return {
        (method, path): api.client.request(method, path, headers=headers).status_code
        for method, path in routes(api)
    }


@pytest.mark.parametrize("token", [None, "guess", "coordinator", "reader"])
def test_every_route_needs_a_token_of_its_own(api: Api, token: str | None) -> None:
    """The coordinator's own token at the shuffler opens nothing here, that of metrics only them."""
    (api.directory / "metrics_hash").write_text(hash_token("reader"))
    api.restart(metrics_token_hash_file=api.directory / "metrics_hash")
    api.client.app.state.authenticator.failures = FailedAttempts(1e9)  # type: ignore[attr-defined]
    admitted = {route for route, status in answers(api, token).items() if status != 401}
    assert admitted == ({("GET", "/metrics")} if token == "reader" else set())


def test_every_route_counts_toward_the_limits(api: Api) -> None:
    key = Credential(hash_token(TOKEN), RateLimit(requests=0.01, reports=1.0, at_once=9))
    authenticator = Authenticator(FailedAttempts(0.01), {"operator": key})
    api.client.app.state.authenticator = authenticator  # type: ignore[attr-defined]
    for token in (TOKEN, "guess"):
        while (
            api.client.get("/v1/runs", headers={"Authorization": f"Bearer {token}"}).status_code
            != 429
        ):
            pass
        assert set(answers(api, token).values()) == {429}, token


@pytest.mark.parametrize(("token", "is_known"), [(TOKEN, True), ("guess", False), (None, False)])
def test_only_a_valid_token_makes_its_caller_known(
    api: Api, token: str | None, *, is_known: bool
) -> None:
    """Connections of known callers have a limit of their own, which strangers must not reach."""
    expected = [is_known] * len(routes(api))
    with known_callers(api.client.app) as known:
        answers(api, token)
    assert known[1:] == expected, "the first request is for the description"


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("", 1 << 20),
        (f"/{RUN}/deployments", 16 << 20),
        (f"/{RUN}/truth", 4 << 20),
    ],
)
def test_every_body_is_bounded(api: Api, path: str, most: int) -> None:
    for content in (bytes(most + 1), iter([bytes(most), b"x"])):  # a declared length or none
        assert problem(api.call("POST", path, content=content))[:2] == (413, "too-large")
    status, read = bytes_read(api.client, "POST", f"/v1/runs{path}", TOKEN, most)
    assert status == 413
    assert read <= most + len(CHUNK), "refused before it is all there"


def test_the_operator_has_a_rate_limit(api: Api) -> None:
    statuses = [api.call("GET", "").status_code for _ in range(5)]
    assert statuses == [200] * 5
    key = Credential(hash_token(TOKEN), RateLimit(requests=0.1, reports=1.0, at_once=9))
    authenticator = Authenticator(FailedAttempts(), {"operator": key})
    api.client.app.state.authenticator = authenticator  # type: ignore[attr-defined]
    assert api.call("GET", "").status_code == 200
    slower = api.call("GET", "")
    assert problem(slower)[:2] == (429, "too-many-requests")
    assert int(slower.headers["Retry-After"]) >= 1


def test_the_limits_that_hold_by_default(api: Api) -> None:
    """Whoever changes one has thought of what a caller may then cost the others."""
    (api.directory / "metrics_hash").write_text(hash_token("reader"))
    api.restart(metrics_token_hash_file=api.directory / "metrics_hash")
    app = api.client.app
    authenticator = app.state.authenticator  # type: ignore[attr-defined]
    limits = {who: most_of_one_caller(each) for who, each in authenticator._limits.items()}
    assert limits == dict.fromkeys(("operator", "metrics"), (2_000, 10, 256))
    assert most_guesses(authenticator.failures) == 1_000
    assert limits_of_all_together(app) == [512]


def test_waiting_for_an_unknown_run_leaves_nothing(api: Api) -> None:
    unknown = [f"/{number:032x}/deployment?wait=1" for number in range(3)]
    assert {api.call("GET", path).status_code for path in unknown} == {404}
    signals = api.client.app.state.coordinator.signals  # type: ignore[attr-defined]
    assert signals._signals == {}


def test_a_caller_that_guesses_tokens_is_told_to_come_back(api: Api) -> None:
    authenticator = api.client.app.state.authenticator  # type: ignore[attr-defined]
    authenticator.failures = FailedAttempts(0.2)
    assert api.call("GET", "").status_code == 200
    guess = {"Authorization": "Bearer guess"}
    guesses = [api.client.get("/v1/runs", headers=guess) for _ in range(3)]
    assert [answer.status_code for answer in guesses] == [401, 401, 429]
    assert int(guesses[-1].headers["Retry-After"]) >= 1
    assert api.call("GET", "").status_code == 200


def test_a_wrong_analyzer_key_waits_for_the_right_one(api: Api) -> None:
    right, api.shuffler.fills = api.analyzer, False
    api.call("POST", "", json=SMALL)
    api.until(lambda: "status" in api.shuffler.calls)
    api.analyzer = lambda: Analyzer(one_key(KeyPair.from_private(bytes(32))), 1, ThreadPoolExecutor)
    api.restart()
    api.shuffler.fills = True
    api.until(lambda: api.get(f"/{RUN}")["trouble"] is not None)
    shown = api.get(f"/{RUN}")
    assert (shown["state"], "the folder of keys that it had" in shown["trouble"]) == (
        "running",
        True,
    )
    assert "messages" not in api.shuffler.calls
    ready = api.client.get("/readyz")
    assert (ready.status_code, ready.json()["shuffler"]) == (503, "ok")
    assert ready.json()["analyzer"] == shown["trouble"]
    api.analyzer = right
    api.restart()
    api.wait_for("finished")
    assert api.client.get("/readyz").status_code == 200


@pytest.mark.parametrize("gone", ["keys", "store", "data"])
def test_readiness_tells_strangers_no_paths(
    api: Api, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = api.client.app.state.coordinator  # type: ignore[attr-defined]
    if gone == "keys":
        coordinator.keys._folder = api.directory / "nowhere"
    elif gone == "store":
        database = f"sqlite:///{api.directory}/nowhere/store"
        monkeypatch.setattr(coordinator.store, "_writer", create_engine(database))
    else:
        api.client.app.state.data_dir = api.directory / "nowhere"  # type: ignore[attr-defined]
        monkeypatch.setattr("shutil.disk_usage", Mock(side_effect=OSError(2, "gone", "/nowhere")))
    api.clock = lambda: time.time() + 1
    ready = api.client.get("/readyz")
    assert ready.status_code == 503
    assert "/" not in ready.text


def test_another_shuffler_is_not_ready(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def other() -> str:
        return "shuffler-2"

    monkeypatch.setattr(api.shuffler, "identity", other)
    assert SHUFFLER_ID in api.client.get("/readyz").json()["shuffler"]


def test_the_test_entry_stays_on_loopback(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="loopback"):
        create_app(settings(tmp_path, host="0.0.0.0", test_entry=True))  # noqa: S104


def test_the_description_is_complete(api: Api) -> None:
    paths = api.client.get("/openapi.json").json()["paths"]
    create = paths["/v1/runs"]["post"]
    assert "epsilon" in create["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert all(
        any(status.startswith("2") for status in way["responses"])
        for path in paths.values()
        for way in path.values()
    )


def test_a_global_tracer_gets_nothing(api: Api, elsewhere: InMemorySpanExporter) -> None:
    """The framework would record paths, callers' addresses and the text of exceptions."""
    api.finish()
    assert api.client.get("/nowhere").status_code == 404
    assert elsewhere.get_finished_spans() == ()
