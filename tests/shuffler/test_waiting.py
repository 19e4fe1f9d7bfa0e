"""Long polls, budgets and shared answers."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import Request
from starlette.types import Message

from common.errors import LocalError
from common.service import read_body
from shuffler.store import Open
from shuffler.waiting import Budget, Changes, metered


def test_a_budget_is_given_back() -> None:
    budget = Budget(10, "things")
    with budget.hold(10), pytest.raises(LocalError) as caught, budget.hold(1):
        pass
    assert (caught.value.slug, caught.value.retry_after) == ("too-many-requests", 1)
    with budget.hold(10):
        pass


def test_a_meter_takes_more_and_gives_all_back() -> None:
    budget = Budget(10, "things")
    with budget.meter() as first, budget.meter() as second:
        first(6)
        second(4)
        with pytest.raises(LocalError):
            first(1)
    with budget.hold(10):
        pass


def test_one_holder_leaves_some_to_the_others() -> None:
    budget = Budget(10, "things", each=4)
    with budget.meter("greedy") as one, budget.meter("greedy") as again, budget.meter("b") as two:
        one(3)
        with pytest.raises(LocalError):
            again(2)
        two(4)
    with budget.meter("greedy") as after:
        after(4)
    assert budget.taken == 0


def test_a_body_is_charged_as_it_arrives() -> None:
    """What a request declares is worth nothing: only what came holds the budget."""
    sent = [
        {"type": "http.request", "body": b"abc", "more_body": True},
        {"type": "http.request", "body": b"de", "more_body": False},
    ]
    taken: list[int] = []

    async def receive() -> Message:
        return sent[len(taken)]

    async def scenario() -> bytes:
        headers = [(b"content-length", b"1000000")]
        request = Request({"type": "http", "headers": headers}, receive)
        return await read_body(metered(request, taken.append), 100)

    assert asyncio.run(scenario()) == b"abcde"
    assert taken == [3, 2]


def test_a_poll_ends_when_something_changes() -> None:
    async def scenario() -> float:
        changes, values = Changes(), iter([0, 1])

        async def look() -> int:
            return next(values)

        poll = asyncio.create_task(changes.poll(30, look, lambda value: value == 1))
        await asyncio.sleep(0.01)
        started = time.perf_counter()
        changes.notify()
        assert await poll == 1
        return time.perf_counter() - started

    assert asyncio.run(scenario()) < 0.5


def test_a_change_between_looking_and_waiting_is_not_lost() -> None:
    async def scenario() -> float:
        changes, seen = Changes(), 0

        async def look() -> int:
            nonlocal seen
            seen += 1
            if seen == 1:
                changes.notify()
            return seen

        started = time.perf_counter()
        await changes.poll(30, look, lambda value: value == 2)
        return time.perf_counter() - started

    assert asyncio.run(scenario()) < 0.5


def test_a_service_that_stops_lets_nobody_wait() -> None:
    async def scenario() -> float:
        changes = Changes()

        async def look() -> int:
            return 0

        poll = asyncio.create_task(changes.poll(30, look, bool))
        await asyncio.sleep(0.01)
        started = time.perf_counter()
        changes.close()
        assert await poll == 0
        assert await changes.poll(30, look, bool) == 0, "who comes later does not wait either"
        return time.perf_counter() - started

    assert asyncio.run(scenario()) < 0.5


def test_a_poll_ends_in_time() -> None:
    async def scenario() -> float:
        async def look() -> int:
            return 0

        started = time.perf_counter()
        assert await Changes().poll(0.2, look, bool) == 0
        return time.perf_counter() - started

    assert 0.15 < asyncio.run(scenario()) < 1.0


def test_who_saw_what_may_change_unsaid_looks_again_sooner() -> None:
    alone, shared = Changes(), Changes(shared=True)
    assert alone.pause(unsaid=False) == 5.0
    assert {alone.pause(unsaid=True), shared.pause(unsaid=False)} == {1.0}

    async def scenario() -> list[int]:
        changes, looks = Changes(), [0, 0]

        def look_of(who: int) -> Callable[[], Awaitable[int]]:
            async def look() -> int:
                looks[who] += 1
                return 0

            return look

        still = changes.poll(1.5, look_of(0), bool)
        unsaid = changes.poll(1.5, look_of(1), bool, lambda found: found == 0)
        await asyncio.gather(still, unsaid)
        return looks

    assert asyncio.run(scenario()) == [2, 3], "at once, after a second, and when it is over"


def test_many_who_wait_look_less_often_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shuffler.waiting.LOOKS_A_SECOND", 1)

    async def scenario() -> list[float]:
        changes, looks = Changes(shared=True), 0

        async def look() -> int:
            nonlocal looks
            looks += 1
            return 0

        pauses = [changes.pause(unsaid=False)]
        polls = [asyncio.create_task(changes.poll(30, look, bool)) for _ in range(3)]
        await asyncio.sleep(0.01)
        pauses.append(changes.pause(unsaid=False))
        await asyncio.sleep(1.5)
        assert looks == 3 + 1, "the first, which came alone, has looked again after a second"
        changes.close()
        await asyncio.gather(*polls)
        return [*pauses, changes.pause(unsaid=False)]

    assert asyncio.run(scenario()) == [1.0, 3.0, 1.0]


def test_too_many_polls_are_refused() -> None:
    async def scenario() -> None:
        changes = Changes(max_waiting=1)

        async def look() -> int:
            return 0

        poll = asyncio.create_task(changes.poll(0.2, look, bool))
        await asyncio.sleep(0.01)
        with pytest.raises(LocalError) as caught:
            await changes.poll(0.2, look, bool)
        assert caught.value.slug == "too-many-requests"
        await poll

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("next_expiry", "lease_seconds", "soon"),
    [(None, 1, False), (20, 60, False), (16, 60, True), (17, 60, False), (20, 6, True)],
)
def test_who_waits_for_a_slot_looks_sooner_where_one_may_expire(
    next_expiry: int | None, lease_seconds: int, soon: bool
) -> None:
    """Be it by a lease that is granted while it waits."""
    assert Open([], 10, next_expiry).changes_within(5.0, lease_seconds) == soon
