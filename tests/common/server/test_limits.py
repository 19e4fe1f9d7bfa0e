"""Rate and concurrency limits: what passes, what is refused, and for how long."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.process.journal import Journal
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.limits import (
    CallerLimits,
    ConcurrencyLimit,
    FailedAttempts,
    RateLimit,
    TokenBucket,
)
from riffle.common.server.service import install_problem_handlers

MOST = 1_000_000


def passed(act: Callable[[], object]) -> int:
    """Returns how many calls pass before one is refused."""
    for number in range(MOST):
        try:
            act()
        except LocalError:
            return number
    raise AssertionError("there is no limit")


def most_of_one_caller(limits: CallerLimits) -> tuple[int, int, int]:
    """Returns what a caller gets at one instant: requests, reports, and requests under way."""

    def request() -> None:
        with limits.request("a", 0.0):
            pass

    hours = count(3_600.0, 3_600.0)
    with ExitStack() as under_way:
        return (
            passed(request),
            passed(lambda: limits.reports("a", 1, 0.0)),
            passed(lambda: under_way.enter_context(limits.request("a", next(hours)))),
        )


def most_guesses(failures: FailedAttempts) -> int:
    """Returns how many tokens strangers can guess at one instant."""
    failures._clock = lambda: 0.0

    def guess() -> None:
        with suppress(RemoteError), failures.attempt("guess"):
            raise RemoteError("unauthorized", "no")

    return passed(guess)


def limits_of_all_together(app: Any) -> list[int]:
    """Returns how many requests an app takes at once, of all callers together."""
    return [one.kwargs["limit"] for one in app.user_middleware if one.cls is ConcurrencyLimit]


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 30)), max_size=60))
def test_no_more_than_burst_and_rate_ever_passes(requests: list[tuple[float, int]]) -> None:
    bucket, now, passed = TokenBucket(rate=4.0, burst=10.0), 0.0, 0.0
    for pause, amount in requests:
        now += pause
        if not bucket.take(amount, now):
            passed += amount
        # The bucket owes what is beyond a burst: at most one such request.
        assert passed <= 10 + 4 * now + 30


def test_a_caller_who_waits_as_long_as_asked_gets_through() -> None:
    bucket = TokenBucket(rate=2.0, burst=4.0)
    assert [bucket.take(2, 100.0) for _ in range(2)] == [0.0, 0.0]
    wait = bucket.take(3, 100.0)
    assert wait == pytest.approx(1.5)
    assert bucket.take(3, 100.0 + wait) == 0.0


def test_more_than_a_burst_passes_when_the_bucket_is_full() -> None:
    bucket = TokenBucket(rate=1.0, burst=4.0)
    assert bucket.take(10, 0.0) == 0.0
    assert bucket.take(1, 1.0) == pytest.approx(6.0)


def test_a_clock_that_steps_back_gives_nothing() -> None:
    bucket = TokenBucket(rate=1.0, burst=2.0)
    bucket.take(2, 100.0)
    assert bucket.take(1, 50.0) > 0


def test_each_caller_has_a_limit_of_its_own() -> None:
    callers = CallerLimits(RateLimit(requests=1.0, reports=1.0, at_once=2))
    with callers.request("a", 0.0), callers.request("a", 0.0):
        with pytest.raises(LocalError, match="under way") as caught, callers.request("a", 0.0):
            pass
        assert (caught.value.slug, caught.value.retry_after) == ("too-many-requests", 1)
        with callers.request("b", 0.0):
            pass
    for _ in range(8):
        with callers.request("a", 0.0):
            pass
    with pytest.raises(LocalError, match="a second"), callers.request("a", 0.0):
        pass
    callers.reports("a", 10, 0.0)
    with pytest.raises(LocalError, match="reports"):
        callers.reports("a", 1, 0.0)


def test_a_failed_request_is_no_longer_under_way() -> None:
    callers = CallerLimits(RateLimit(requests=100.0, reports=1.0, at_once=1))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), callers.request("a", 0.0):
            raise ZeroDivisionError


def test_a_request_beyond_the_concurrency_limit_gets_429() -> None:
    app, inside, go = FastAPI(), asyncio.Event(), asyncio.Event()
    install_problem_handlers(app, Journal("test"))
    app.add_middleware(ConcurrencyLimit, limit=1)

    @app.get("/")
    async def slow() -> None:
        inside.set()
        await go.wait()

    async def act() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            first = asyncio.create_task(client.get("/"))
            await inside.wait()
            second = await client.get("/")
            go.set()
            return [await first, second, await client.get("/")]

    answers = asyncio.run(act())
    assert [answer.status_code for answer in answers] == [200, 429, 200]
    assert answers[1].headers["Retry-After"] == "1"
    assert answers[1].json()["type"] == "urn:riffle:problem:too-many-requests"
