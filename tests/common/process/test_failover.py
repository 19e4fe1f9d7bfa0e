"""Failover: which replica gets a request, in which order, after which failure."""

import asyncio
import json
from dataclasses import dataclass, field

import httpx
import pytest

from riffle.common.process.endpoint import (
    LONGEST_PAUSE_SECONDS,
    NOBODY_LISTENS,
    PAUSE_SECONDS,
    AsyncFailover,
    Failover,
    check_urls,
    split_urls,
)
from riffle.common.process.journal import Journal

URLS = ("https://one:1", "https://two:2", "https://three:3")


@dataclass
class Replicas:
    """Answer by host: a status, or no answer."""

    answers: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys("123", 200))
    asked: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    now: float = 0.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        key = str(request.url.port)
        assert request.headers["Host"] == f"{request.url.host}:{key}"
        assert request.url.path == "/v1/x"
        self.asked.append(key)
        self.bodies.append(request.content)
        status = self.answers[key]
        if status is None:
            raise httpx.ConnectError("nobody there", request=request)
        return httpx.Response(status)

    def client(self) -> httpx.Client:
        inner = httpx.MockTransport(self)
        transport = Failover(URLS, inner, clock=lambda: self.now)
        return httpx.Client(base_url=URLS[0], transport=transport)


def test_requests_go_to_the_first_replica_as_long_as_it_answers() -> None:
    replicas = Replicas()
    with replicas.client() as client:
        assert [client.get("/v1/x").status_code for _ in range(3)] == [200] * 3
    assert replicas.asked == ["1", "1", "1"]


def test_a_silent_replica_is_skipped_and_tried_again_later() -> None:
    replicas = Replicas()
    replicas.answers["1"] = None
    with replicas.client() as client:
        client.post("/v1/x", content=b"the same body")
        client.get("/v1/x")
        replicas.answers["1"] = 200
        replicas.now = PAUSE_SECONDS + 1
        client.get("/v1/x")
    assert replicas.asked == ["1", "2", "2", "1"]
    assert replicas.bodies[:2] == [b"the same body"] * 2


def test_a_replica_that_stays_silent_is_tried_less_often_until_it_answers() -> None:
    replicas = Replicas()
    replicas.answers["1"] = None
    with replicas.client() as client:

        def tried(seconds: int) -> int:
            replicas.asked.clear()
            for _ in range(seconds):
                replicas.now += 1
                client.get("/v1/x")
            return replicas.asked.count("1")

        assert tried(150) == 6  # after 5, 10, 20, 40 and 60 seconds
        replicas.answers["1"] = 200
        assert tried(int(LONGEST_PAUSE_SECONDS)) > 1
        replicas.answers["1"] = None
        assert tried(15) == 2


def test_after_a_503_the_next_request_goes_elsewhere() -> None:
    replicas = Replicas()
    replicas.answers["1"] = 503
    with replicas.client() as client:
        assert [client.get("/v1/x").status_code for _ in range(2)] == [503, 200]


def test_a_refusal_is_an_answer() -> None:
    replicas = Replicas()
    replicas.answers["1"] = 429
    with replicas.client() as client:
        assert [client.get("/v1/x").status_code for _ in range(2)] == [429, 429]


def test_when_no_replica_answers_the_last_error_is_raised() -> None:
    replicas = Replicas(dict.fromkeys("123"))
    with replicas.client() as client:
        for _ in range(2):
            with pytest.raises(httpx.ConnectError):
                client.get("/v1/x")
    assert replicas.asked == ["1", "2", "3"] * 2


def test_a_replica_that_is_skipped_is_logged_once_until_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "riffle.test")
    replicas, journal = Replicas(), Journal("test", "detail")
    inner = httpx.MockTransport(replicas)
    urls = ("https://me:secret@one:1", *URLS[1:])
    transport = Failover(urls, inner, clock=lambda: replicas.now, journal=journal)
    with httpx.Client(base_url=urls[0], transport=transport) as client:
        for answer, lines in ((None, 1), (None, 1), (200, 1), (None, 2)):
            replicas.answers["1"] = answer
            replicas.now += 2 * LONGEST_PAUSE_SECONDS
            client.get("/v1/x")
            assert len(caplog.messages) == lines
    line = json.loads(caplog.messages[0])
    detail = f"https://one:1 does not answer: {NOBODY_LISTENS}"
    assert line == {"event": "replica-skipped", "detail": detail}


def test_requests_are_spread_over_the_replicas_that_answer() -> None:
    replicas = Replicas()
    replicas.answers["2"] = None

    async def scenario() -> None:
        inner = httpx.MockTransport(replicas)
        transport = AsyncFailover(URLS, inner, spread=True, clock=lambda: replicas.now)
        async with httpx.AsyncClient(base_url=URLS[0], transport=transport) as client:
            for _ in range(6):
                assert (await client.post("/v1/x", content=b"it")).status_code == 200

    asyncio.run(scenario())
    assert replicas.asked.count("2") == 1
    assert min(replicas.asked.count("1"), replicas.asked.count("3")) >= 2


def test_each_address_of_a_setting_is_checked() -> None:
    assert split_urls("https://a:1, https://b:2") == ("https://a:1", "https://b:2")
    assert check_urls("x", "https://a:1,http://127.0.0.1:2")
    with pytest.raises(ValueError, match="TLS is mandatory"):
        check_urls("x", "https://a:1,http://b:2")
    with pytest.raises(ValueError, match="must be"):
        check_urls("x", "https://a:1,")
