"""The operator's client: events over broken connections, refusals, missing answers."""

from collections.abc import Callable, Iterator
from typing import get_args

import httpx
import pytest

from docs.reference import apps
from riffle.common.protocol.errors import URN, LocalError, RemoteError
from riffle.coordinator.runs.coordinator import LONGEST_WAIT_SECONDS
from riffle.coordinator.specs import ManualDeployment, TrueValue, TrueValueSpec
from riffle.deploy.network.secrets import REQUEST_SECONDS
from riffle.deploy.operator import RETRY_SECONDS, Operator, Table
from riffle.deploy.presets import preset

RUN = "ab" * 16
WRONG_PLACE = (
    "http://coordinator answers, but not as the coordinator does; "
    "is it the address of another service?"
)
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
        if request.url.path == "/livez":
            return httpx.Response(200, json={})
        requests.append(request.headers["Last-Event-ID"])
        if len(requests) == 1:  # breaks inside the second event
            whole = event(1, "run_started") + ": ping\n\n"
            return httpx.Response(200, stream=Broken(whole, event(2, "deployment_issued")[:-9]))
        if len(requests) == 2:  # the service was stopped: a stream that ends in good order
            return httpx.Response(200, text=event(2, "deployment_issued"))
        return httpx.Response(200, text=event(3, "batch_counted") + event(4, "run_finished"))

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
        if request.url.path == "/livez":
            return httpx.Response(200)
        requests.append(request.url.path)
        over = event(1, "run_finished") if len(requests) > 5 else ""
        stream = Broken() if len(requests) % 2 else httpx.ByteStream(over.encode())
        return httpx.Response(200, stream=stream)

    with operator(ends) as client:
        assert len(list(client.events(RUN))) == 1
    assert pauses == [RETRY_SECONDS] * (len(requests) - 1)


def test_events_wait_for_a_coordinator_that_starts_again() -> None:
    pings: list[float] = []

    def restarting(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/livez":
            pings.append(0)
            return httpx.Response(200) if len(pings) > 1 else refuse_connection(request)
        if not pings:
            return httpx.Response(200, stream=Broken(event(1, "run_started")))
        return httpx.Response(200, text=event(2, "run_finished"))

    client = httpx.Client(transport=httpx.MockTransport(restarting), base_url="http://coordinator")
    with Operator(client, patience=30) as patient:
        kinds = [item["kind"] for item in patient.events(RUN)]
    assert kinds == ["run_started", "run_finished"]


def test_events_raise_when_the_coordinator_does_not_answer() -> None:
    def dies(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/livez":
            refuse_connection(request)
        return httpx.Response(200, stream=Broken(event(1, "run_started")))

    with operator(dies) as client:
        events = client.events(RUN)
        assert next(events)["kind"] == "run_started"
        message = r"does not answer: the connection broke; has its network ended"
        with pytest.raises(LocalError, match=message) as caught:
            next(events)
    assert caught.value.slug == "unavailable"


@pytest.mark.parametrize(
    ("answer", "slug", "detail"),
    [
        (
            httpx.Response(404, json={"type": f"{URN}unknown-run", "detail": "there is no run ab"}),
            "unknown-run",
            "the coordinator refused: there is no run ab",
        ),
        (
            httpx.Response(404, json={"type": f"{URN}not-found", "detail": "Not Found"}),
            "not-found",
            WRONG_PLACE,
        ),
        (httpx.Response(404, text="<html>"), "not-found", WRONG_PLACE),
        (httpx.Response(502, text="<html>"), "internal", "the coordinator refused: status 502"),
        (httpx.Response(400, json=["odd"]), "internal", "the coordinator refused: status 400"),
    ],
)
def test_refusal_is_raised_with_its_reason(answer: httpx.Response, slug: str, detail: str) -> None:
    with operator(lambda _: answer) as client:
        for ask in (client.run, client.stop, lambda run: next(client.events(run))):
            with pytest.raises(RemoteError) as caught:
                ask(RUN)
            assert (caught.value.slug, caught.value.detail) == (slug, detail)


def test_error_names_a_coordinator_that_does_not_answer() -> None:
    with operator(refuse_connection) as client:
        for ask in (client.runs, lambda: client.create_run(preset("demo").spec)):
            message = r"http://coordinator.* does not answer: refused; has its network ended"
            with pytest.raises(LocalError, match=message) as caught:
                ask()
            assert caught.value.slug == "unavailable"


def test_every_route_has_a_method() -> None:
    """The client calls exactly the operator's routes of the coordinator's OpenAPI document."""
    requests: set[tuple[str, str]] = set()

    def coordinator(request: httpx.Request) -> httpx.Response:
        path = request.url.path.replace(RUN, "{run_id}").replace("/keys/ab", "/keys/{key_id}")
        requests.add((request.method, path.replace("/deployments/2", "/deployments/{index}")))
        if path.endswith("/events"):
            return httpx.Response(200, text=event(1, "run_finished"))
        lists = ("runs", "deployments", "stages", "keys", "events")
        return httpx.Response(200, json={name: [{"of": name}] for name in lists})

    with operator(coordinator) as client:
        lists = [*client.runs(), *client.deployments(RUN), *client.stages(RUN), *client.keys()]
        lists += client.history(RUN)
        client.create_run(preset("demo").spec)
        client.deploy(RUN, ManualDeployment(policy=((0,),), episodes=1))
        client.supply_true_values(
            RUN, TrueValueSpec(optimal_value=1.0, values=(TrueValue(deployment=0, value=1.0),))
        )
        for ask in (client.run, client.stop, client.newest, client.ledger, client.result):
            assert ask(RUN)
        for look in (client.conservation, client.true_values, client.events):
            assert list(look(RUN))
        for answer in (client.deployment(RUN, 2), client.make_key(), client.activate_key("ab")):
            assert answer
        for table in get_args(Table):
            assert client.csv(RUN, table)
    assert [row["of"] for row in lists] == ["runs", "deployments", "stages", "keys", "events"]
    paths = apps()["Coordinator"].openapi()["paths"]
    routes = {(method.upper(), path) for path in paths for method in paths[path]}
    assert requests == {route for route in routes if route[1].startswith("/v1/")}


def test_client_waits_for_the_newest_deployment() -> None:
    seen: list[tuple[str, str | None]] = []

    def coordinator(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.query.decode(), request.headers.get("If-None-Match")))
        return httpx.Response(304) if len(seen) > 1 else httpx.Response(200, json={"index": 3})

    with operator(coordinator) as client:
        assert client.newest(RUN) == {"index": 3}
        assert client.newest(RUN, known=3, wait=20) is None
    assert seen == [("wait=0.0", None), ("wait=20", '"3"')]
    assert REQUEST_SECONDS > LONGEST_WAIT_SECONDS, "no client gives up before the coordinator"
