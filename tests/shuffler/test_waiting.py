"""Long polls and budgets. The polls run on a loop with simulated time, so times are exact."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
from starlette.requests import Request
from starlette.types import Message

from riffle.common.protocol.errors import LocalError
from riffle.common.server.service import read_body
from riffle.shuffler.store.batch_rows import OpenBatches
from riffle.shuffler.waiting import Budget, ChangeSignal, metered
from tests.system.simulation import machine

T = TypeVar("T")


def timed(scenario: Coroutine[object, object, T]) -> tuple[T, float]:
    """Returns the scenario's result and the seconds it took, to the millisecond."""

    async def whole() -> tuple[T, float]:
        found = await scenario
        return found, round(asyncio.get_running_loop().time(), 3)

    return machine.run(whole())


@contextmanager
def hold(budget: Budget, amount: int) -> Iterator[None]:
    with budget.meter() as take:
        take(amount)
        yield


def test_a_budget_is_returned() -> None:
    budget = Budget(10, "things")
    with hold(budget, 10), pytest.raises(LocalError) as caught, hold(budget, 1):
        pass
    assert (caught.value.slug, caught.value.retry_after) == ("too-many-requests", 1)
    with pytest.raises(KeyError), hold(budget, 10):
        raise KeyError
    with hold(budget, 10):
        pass


def test_a_meter_takes_more_and_returns_all() -> None:
    budget = Budget(10, "things")
    with budget.meter() as first, budget.meter() as second:
        first(6)
        second(4)
        with pytest.raises(LocalError):
            first(1)
    with hold(budget, 10):
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
    """A declared length takes nothing of the budget; only bytes that came do."""
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
    async def scenario() -> int:
        changes, values = ChangeSignal(), iter([0, 1])

        async def look() -> int:
            return next(values)

        poll = asyncio.create_task(changes.poll(30, look, lambda value: value == 1))
        await asyncio.sleep(0.1)
        changes.notify()
        return await poll

    assert timed(scenario()) == (1, 0.1)


def test_a_change_between_looking_and_waiting_is_not_lost() -> None:
    async def scenario() -> int:
        changes, seen = ChangeSignal(), 0

        async def look() -> int:
            nonlocal seen
            seen += 1
            if seen == 1:
                changes.notify()
            return seen

        return await changes.poll(30, look, lambda value: value == 2)

    assert timed(scenario()) == (2, 0.0)


def test_a_stopping_service_ends_all_waiting() -> None:
    async def scenario() -> int:
        changes = ChangeSignal()

        async def look() -> int:
            return 0

        poll = asyncio.create_task(changes.poll(30, look, bool))
        await asyncio.sleep(0.1)
        changes.close()
        assert await poll == 0
        return await changes.poll(30, look, bool)

    assert timed(scenario()) == (0, 0.1), "a later caller does not wait either"


def test_a_poll_ends_in_time() -> None:
    async def scenario() -> int:
        async def look() -> int:
            return 0

        return await ChangeSignal().poll(0.2, look, bool)

    assert timed(scenario()) == (0, 0.2)


def test_a_waiter_checks_sooner_when_a_change_may_be_silent() -> None:
    alone, shared = ChangeSignal(), ChangeSignal(shared=True)
    assert alone.pause(silent=False) == 5.0
    assert {alone.pause(silent=True), shared.pause(silent=False)} == {1.0}

    async def scenario() -> list[int]:
        changes, looks = ChangeSignal(), [0, 0]

        def look_of(who: int) -> Callable[[], Awaitable[int]]:
            async def look() -> int:
                looks[who] += 1
                return 0

            return look

        still = changes.poll(1.5, look_of(0), bool)
        unsaid = changes.poll(1.5, look_of(1), bool, lambda found: found == 0)
        await asyncio.gather(still, unsaid)
        return looks

    found = timed(scenario())
    assert found == ([2, 3], 1.5), "at once, after a second, and when it is over"


def test_many_waiters_check_less_often_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("riffle.shuffler.waiting.CHECKS_A_SECOND", 1)

    async def scenario() -> list[float]:
        changes, looks = ChangeSignal(shared=True), 0

        async def look() -> int:
            nonlocal looks
            looks += 1
            return 0

        pauses = [changes.pause(silent=False)]
        polls = [asyncio.create_task(changes.poll(30, look, bool)) for _ in range(3)]
        await asyncio.sleep(0.01)
        pauses.append(changes.pause(silent=False))
        await asyncio.sleep(1.5)
        assert looks == 3 + 1, "the first, which came alone, has looked again after a second"
        changes.close()
        await asyncio.gather(*polls)
        return [*pauses, changes.pause(silent=False)]

    assert machine.run(scenario()) == [1.0, 3.0, 1.0]


def test_too_many_polls_are_refused() -> None:
    async def scenario() -> None:
        changes = ChangeSignal(max_waiting=1)

        async def look() -> int:
            return 0

        poll = asyncio.create_task(changes.poll(0.2, look, bool))
        await asyncio.sleep(0.01)
        with pytest.raises(LocalError) as caught:
            await changes.poll(0.2, look, bool)
        assert caught.value.slug == "too-many-requests"
        await poll

    machine.run(scenario())


@pytest.mark.parametrize(
    ("next_expiry", "lease_seconds", "soon"),
    [(None, 1, False), (20, 60, False), (16, 60, True), (17, 60, False), (20, 6, True)],
)
def test_a_waiter_for_a_slot_checks_sooner_where_one_may_expire(
    next_expiry: int | None, lease_seconds: int, soon: bool
) -> None:
    """The expiring lease may be granted while the waiter waits."""
    assert OpenBatches([], 10, next_expiry).changes_within(5.0, lease_seconds) == soon
