"""The operator's client: events over broken connections, refusals, missing answers."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import httpx
import pytest

from docs.reference import apps
from riffle.common.protocol.errors import URN, LocalError, RiffleError
from riffle.coordinator.runs.coordinator import LONGEST_WAIT_SECONDS
from riffle.coordinator.specs import TrueValue, TrueValueSpec
from riffle.deploy.network.secrets import REQUEST_SECONDS
from riffle.deploy.operator import RETRY_SECONDS, Operator, Table
from riffle.deploy.output import RunError
from riffle.experiments.presets import preset

RUN = "ab" * 16
WRONG_PLACE = (
    "a server that is not the coordinator at http://coordinator answered with status {}: "
    "a proxy in between, or another service?"
)
RUNNING = httpx.Response(200, json={"spec": {}, "state": "running"})
Handler = Callable[[httpx.Request], httpx.Response]


def operator(handler: Handler) -> Operator:
    transport = httpx.MockTransport(handler)
    return Operator(httpx.Client(transport=transport, base_url="http://coordinator"), patience=0)


def event(number: int, kind: str) -> str:
    return f'event: {kind}\ndata: {{"run": "{RUN}"}}\nid: {number}\n\n'


class Broken(httpx.SyncByteStream):
    """A body whose connection breaks after these lines."""

    def __init__(self, *lines: str) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[bytes]:
        for line in self._lines:
            yield line.encode()
        raise httpx.ReadError("the connection broke")


def refuse_connection(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def test_events_resume_where_a_connection_broke() -> None:
    requests: list[str] = []

    def coordinator(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return RUNNING
        requests.append(request.headers["Last-Event-ID"])
        if len(requests) == 1:  # breaks inside the second event
            whole = event(1, "run_started") + ": ping\n\n"
            return broken(whole, event(2, "deployment_issued")[:-9])
        if len(requests) == 2:  # the service was stopped: a stream that ends in good order
            return stream(event(2, "deployment_issued"))
        return stream(event(3, "batch_counted") + event(4, "run_finished"))

    with operator(coordinator) as client:
        events = list(client.events(RUN))
    assert requests == ["0", "1", "2"]
    assert [item["kind"] for item in events] == [
        "run_started",
        "deployment_issued",
        "batch_counted",
        "run_finished",
    ]
    assert events[0]["data"] == {"run": RUN}


def test_client_pauses_before_it_opens_a_stream_again(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []
    pauses: list[float] = []
    monkeypatch.setattr("riffle.deploy.operator.time.sleep", pauses.append)

    def ends(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return RUNNING
        requests.append(request.url.path)
        over = event(1, "run_finished") if len(requests) > 5 else ""
        return broken() if len(requests) % 2 else stream(over)

    with operator(ends) as client:
        assert len(list(client.events(RUN))) == 1
    assert pauses == [RETRY_SECONDS] * (len(requests) - 1)


def test_events_wait_for_a_coordinator_that_starts_again() -> None:
    pings: list[float] = []

    def restarting(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            pings.append(0)
            return RUNNING if len(pings) > 1 else refuse_connection(request)
        return stream(event(2, "run_finished")) if pings else broken(event(1, "run_started"))

    client = httpx.Client(transport=httpx.MockTransport(restarting), base_url="http://coordinator")
    with Operator(client, patience=30) as patient:
        kinds = [item["kind"] for item in patient.events(RUN)]
    assert kinds == ["run_started", "run_finished"]


def test_events_raise_when_the_coordinator_does_not_answer() -> None:
    def dies(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            refuse_connection(request)
        return broken(event(1, "run_started"))

    with operator(dies) as client:
        events = client.events(RUN)
        assert next(events)["kind"] == "run_started"
        message = r"does not answer: nothing accepts .*; has its network ended"
        with pytest.raises(LocalError, match=message) as caught:
            next(events)
    assert caught.value.slug == "unavailable"


@pytest.mark.parametrize(
    ("answer", "slug", "detail"),
    [
        (
            httpx.Response(404, json={"type": f"{URN}unknown-run", "detail": "there is no run ab"}),
            "unknown-run",
            "the coordinator at http://coordinator refused: there is no run ab",
        ),
        (
            httpx.Response(404, json={"type": f"{URN}not-found", "detail": "Not Found"}),
            "unavailable",
            WRONG_PLACE.format(404),
        ),
        (httpx.Response(404, text="<html>"), "unavailable", WRONG_PLACE.format(404)),
        (httpx.Response(502, text="<html>"), "unavailable", WRONG_PLACE.format(502)),
        (httpx.Response(400, json=["odd"]), "unavailable", WRONG_PLACE.format(400)),
    ],
)
def test_refusal_is_raised_with_its_reason(answer: httpx.Response, slug: str, detail: str) -> None:
    with operator(lambda _: answer) as client:
        for ask in (client.run, client.stop, lambda run: next(client.events(run))):
            with pytest.raises(RiffleError) as caught:
                ask(RUN)
            assert (caught.value.slug, caught.value.detail) == (slug, detail)


def test_error_names_a_coordinator_that_does_not_answer() -> None:
    with operator(refuse_connection) as client:
        for ask in (client.runs, lambda: client.create_run(preset("demo").spec)):
            message = (
                r"http://coordinator.* does not answer: nothing accepts .*; has its network ended"
            )
            with pytest.raises(LocalError, match=message) as caught:
                ask()
            assert caught.value.slug == "unavailable"


HTML = "<html><body>Please log in</body></html>"
WRONG = {
    "half JSON": httpx.Response(200, text='{"spec": {"na'),
    "empty": httpx.Response(200),
    "a page": httpx.Response(200, html=HTML),
    "another document": httpx.Response(200, json={"status": "ok"}),
    "moved": httpx.Response(302, headers={"Location": "https://login.example"}),
    "a proxy's 400": httpx.Response(400, html=HTML),
    "a proxy's 404": httpx.Response(404, json={"detail": "Not Found"}),
    "a proxy's 502": httpx.Response(502, html=HTML),
}
TRUE_VALUES = TrueValueSpec(optimal_value=1.0, values=(TrueValue(deployment=0, value=1.0),))
CALLS: dict[str, Callable[[Operator], object]] = {
    "runs": lambda client: client.runs(),
    "run": lambda client: client.run(RUN),
    "create": lambda client: client.create_run(preset("demo").spec),
    "stop": lambda client: client.stop(RUN),
    "deploy": lambda client: client.deploy(RUN, {"policy": [[0]], "episodes": 1, "step": 0}),
    "deployments": lambda client: client.deployments(RUN),
    "deployment": lambda client: client.deployment(RUN, 2),
    "newest": lambda client: client.newest(RUN),
    "stages": lambda client: client.stages(RUN),
    "ledger": lambda client: client.ledger(RUN),
    "result": lambda client: client.result(RUN),
    "conservation": lambda client: client.conservation(RUN),
    **{f"{table}.csv": partial(Operator.csv, run_id=RUN, table=table) for table in get_args(Table)},
    "supply true values": lambda client: client.supply_true_values(RUN, TRUE_VALUES),
    "true values": lambda client: client.true_values(RUN),
    "keys": lambda client: client.keys(),
    "make key": lambda client: client.make_key(),
    "activate key": lambda client: client.activate_key("ab"),
    "history": lambda client: client.history(RUN),
    "events": lambda client: list(client.events(RUN)),
}


def coordinator(request: httpx.Request) -> httpx.Response:
    """Answers as a coordinator does, in outline."""
    path = request.url.path
    if path.endswith("/events"):
        return stream(event(1, "run_finished"))
    if path.endswith(".csv"):
        return httpx.Response(200, text="a,b", headers={"Content-Type": "text/csv; charset=utf-8"})
    if path.endswith("/truth") and request.method == "POST":
        return httpx.Response(204)
    names = ("runs", "deployments", "stages", "keys", "events", "batches", "entries")
    fields = ("spec", "policy", "batch_id", "regret", "public")
    lists = {name: [{"of": name}] for name in names}
    return httpx.Response(200, json={"state": "running"} | lists | {name: {} for name in fields})


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", CALLS)
def test_an_answer_that_is_not_the_coordinators_is_asked_for_again(
    call: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riffle.deploy.operator.time.sleep", lambda _: None)
    answers = iter([WRONG[wrong]])

    def once_wrong(request: httpx.Request) -> httpx.Response:
        return next(answers, None) or coordinator(request)

    client = httpx.Client(transport=httpx.MockTransport(once_wrong), base_url="http://coordinator")
    with operator(coordinator) as undisturbed, Operator(client) as patient:
        assert CALLS[call](patient) == CALLS[call](undisturbed)
    assert next(answers, None) is None


def test_a_deployment_without_its_number_is_not_asked_for_twice() -> None:
    """The first request may have arrived; repeated, it would deploy again."""
    requests: list[httpx.Request] = []

    def wrong(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return WRONG["a page"]

    client = httpx.Client(transport=httpx.MockTransport(wrong), base_url="http://coordinator")
    with Operator(client) as patient, pytest.raises(LocalError, match="not the coordinator"):
        patient.deploy(RUN, {"policy": [[0]], "episodes": 1})
    assert len(requests) == 1


def test_a_run_is_created_once_though_its_answer_is_lost() -> None:
    bodies: list[bytes] = []

    def loses(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return coordinator(request) if len(bodies) > 1 else WRONG["empty"]

    client = httpx.Client(transport=httpx.MockTransport(loses), base_url="http://coordinator")
    with Operator(client) as patient:
        patient.create_run(preset("demo").spec)
    assert bodies[0] == bodies[1]
    assert json.loads(bodies[0])["run_id"] is not None


@pytest.mark.parametrize("state", ["failed", "stopped", "finished"])
def test_following_ends_with_a_run_whose_events_are_gone(state: str) -> None:
    """The coordinator's store was restored: fewer events than were seen, and the run is over."""

    def restored(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/events"):
            return stream(event(7, "batch_counted") if last_id(request) < 7 else "")
        if request.url.path.endswith("/history"):
            return httpx.Response(200, json={"events": []})
        return httpx.Response(200, json={"spec": {}, "state": state})

    with operator(restored) as client:
        assert [item["id"] for item in client.events(RUN)] == ["7"]


def test_following_ends_where_the_run_is_gone() -> None:
    def restored(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/events") and last_id(request) < 7:
            return stream(event(7, "batch_counted"))
        problem = {"type": f"{URN}unknown-run", "detail": "there is no run ab"}
        return httpx.Response(404, json=problem)

    with operator(restored) as client, pytest.raises(RunError, match="restored"):
        list(client.events(RUN))


def test_a_silent_stream_is_looked_behind() -> None:
    """The run's document comes at every look, with what keeps the run from going on."""
    looks: list[str] = []

    def silent(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/events"):
            assert request.extensions["timeout"]["read"] <= 10
            if not looks:
                raise httpx.ReadTimeout("silence", request=request)
            return stream(event(1, "run_finished"))
        return httpx.Response(200, json={"spec": {}, "state": "running", "trouble": "no nodes"})

    with operator(silent) as client:
        list(client.events(RUN, on_run=lambda run: looks.append(run["trouble"])))
    assert looks == ["no nodes"]


def last_id(request: httpx.Request) -> int:
    return int(request.headers["Last-Event-ID"])


def broken(*lines: str) -> httpx.Response:
    return httpx.Response(200, stream=Broken(*lines), headers={"Content-Type": "text/event-stream"})


def stream(text: str) -> httpx.Response:
    return httpx.Response(200, text=text, headers={"Content-Type": "text/event-stream"})


def test_every_route_has_a_method() -> None:
    """The client calls exactly the operator's routes of the coordinator's OpenAPI document."""
    requests: set[tuple[str, str]] = set()

    def noting(request: httpx.Request) -> httpx.Response:
        path = request.url.path.replace(RUN, "{run_id}").replace("/keys/ab", "/keys/{key_id}")
        requests.add((request.method, path.replace("/deployments/2", "/deployments/{index}")))
        return coordinator(request)

    with operator(noting) as client:
        answers = {name: call(client) for name, call in CALLS.items()}
    for name in ("runs", "keys"):
        assert answers[name] == [{"of": name}]
    assert answers["history"] == [{"of": "events"}]
    paths = apps()["Coordinator"].openapi()["paths"]
    routes = {(method.upper(), path) for path in paths for method in paths[path]}
    assert requests == {route for route in routes if route[1].startswith("/v1/")}


def test_client_waits_for_the_newest_deployment() -> None:
    seen: list[tuple[str, str | None]] = []

    def coordinator(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.query.decode(), request.headers.get("If-None-Match")))
        return httpx.Response(304) if len(seen) > 1 else httpx.Response(200, json={"batch_id": "3"})

    with operator(coordinator) as client:
        assert client.newest(RUN) == {"batch_id": "3"}
        assert client.newest(RUN, known=3, wait=20) is None
    assert seen == [("wait=0.0", None), ("wait=20", '"3"')]
    assert REQUEST_SECONDS > LONGEST_WAIT_SECONDS, "no client gives up before the coordinator"
