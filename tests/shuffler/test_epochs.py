"""Epochs: a user reports once an epoch, whatever clocks, ends of batches and settings do."""

import random
from contextlib import ExitStack
from typing import Any

import pytest

from tests.shuffler.conftest import Api, both_engines, problem
from tests.shuffler.test_reports import held, refusals
from tests.shuffler.world import NOW, Batch, descriptor_bytes, user

MONTH = 3_600  # NOW is the first second of an epoch
pytestmark = both_engines


def deposit(api: Api, deployment: int, month: int = 0, **changes: object) -> Batch:
    """A batch that expires a second before a month's end, counted from the first."""
    expires_at = NOW + (month + 1) * MONTH - 1
    fields: dict[str, Any] = {"epoch_seconds": MONTH, "expires_at": expires_at} | changes
    return api.deposit(deployment=deployment, **fields)


def report(api: Api, batch: Batch, number: int = 0) -> str:
    return api.outcomes(batch, [(held(api, batch, number).lease, batch.report())])[0]


@pytest.fixture
def monthly(api: Api) -> Api:
    api.restart(epoch_seconds=MONTH)
    return api


def test_a_user_reports_once_an_epoch(monthly: Api) -> None:
    first, second = deposit(monthly, 0), deposit(monthly, 1)
    assert report(monthly, first) == "accepted"
    assert refusals(monthly, second, [user(0)]) == ["user-unavailable"]
    monthly.clock.now += MONTH
    third = deposit(monthly, 2, 1)
    assert report(monthly, third) == "accepted"
    assert refusals(monthly, deposit(monthly, 3, 1), [user(0)]) == ["user-unavailable"]


def test_a_batch_that_spans_the_end_counts_in_the_epoch_in_which_it_expires(monthly: Api) -> None:
    assert report(monthly, deposit(monthly, 0)) == "accepted"
    assert report(monthly, deposit(monthly, 1, 1)) == "accepted"  # still in the first month
    monthly.clock.now += MONTH
    assert refusals(monthly, deposit(monthly, 2, 1), [user(0)]) == ["user-unavailable"]
    far = descriptor_bytes(deployment=3, epoch_seconds=MONTH, expires_at=NOW + 4 * MONTH - 1)
    assert problem(monthly.put(far)) == "epoch-refused"


def test_a_clock_that_goes_back_gives_no_second_report(monthly: Api) -> None:
    open_all_along = deposit(monthly, 0)
    monthly.clock.now += MONTH
    assert report(monthly, deposit(monthly, 1, 1)) == "accepted"
    monthly.clock.now -= MONTH
    assert refusals(monthly, open_all_along, [user(0)]) == ["user-unavailable"]
    assert refusals(monthly, deposit(monthly, 2), [user(0)]) == ["user-unavailable"]


def test_a_report_bars_even_after_a_later_lease_is_forgotten(monthly: Api) -> None:
    """The user's newest lease never reports and is deleted; the report before it still counts."""
    assert report(monthly, deposit(monthly, 0)) == "accepted"
    later = deposit(monthly, 1, 1)
    held(monthly, later)
    assert monthly.abandon(later).status_code == 200
    again = deposit(monthly, 2)
    assert refusals(monthly, again, [user(0)]) == ["user-unavailable"]
    assert report(monthly, deposit(monthly, 3, 1)) == "accepted"


def test_an_answer_that_was_lost_in_an_earlier_epoch_is_repeated(monthly: Api) -> None:
    first = deposit(monthly, 0)
    frame = (held(monthly, first).lease, first.report())
    assert monthly.outcomes(first, [frame]) == ["accepted"]
    assert report(monthly, deposit(monthly, 1, 1)) == "accepted"
    assert monthly.outcomes(first, [frame]) == ["replayed"]
    assert monthly.outcomes(first, [(frame[0], first.report())]) == ["already-reported"]


def test_turning_epochs_on_and_off_gives_no_second_report(api: Api) -> None:
    for_life = api.deposit()
    assert report(api, for_life) == "accepted"
    assert problem(api.put(descriptor_bytes(deployment=9, epoch_seconds=MONTH))) == "epoch-refused"
    api.restart(epoch_seconds=MONTH)
    assert problem(api.put(descriptor_bytes(deployment=9))) == "epoch-refused"
    monthly = deposit(api, 1)
    assert refusals(api, monthly, [user(0)]) == ["user-unavailable"]
    assert report(api, monthly, 1) == "accepted"
    api.restart(epoch_seconds=MONTH // 2)
    shorter = deposit(api, 2, epoch_seconds=MONTH // 2)
    assert refusals(api, shorter, [user(1)]) == ["user-unavailable"]
    api.restart(epoch_seconds=None)
    assert refusals(api, api.deposit(deployment=3), [user(0), user(1)]) == ["user-unavailable"] * 2
    assert report(api, api.deposit(deployment=4), 2) == "accepted"


def test_random_histories_over_replicas_have_one_report_a_user_and_epoch(
    monthly: Api, store_url: str | None
) -> None:
    """Leases that lapse, clocks that jump, batches that end early, two replicas, restarts."""
    draw = random.Random(5)
    with ExitStack() as stack:
        replicas = [monthly, monthly.replica(stack)] if store_url else [monthly]
        batches: list[tuple[Batch, int]] = []
        reported: list[tuple[int, int]] = []
        for step in range(60):
            api, month = draw.choice(replicas), int(monthly.clock.now - NOW) // MONTH
            if step % 6 == 0:
                month += draw.randrange(2)
                batches.append((deposit(api, step, month, n=6), month))
            batch, month = draw.choice(batches[-4:])
            number = draw.randrange(4)
            leases = api.lease(batch, [user(number)]).json()["leases"]
            if leases and draw.random() < 0.7:
                frame = (leases[0]["lease"], batch.report())
                if api.outcomes(batch, [frame]) == ["accepted"]:
                    reported.append((number, month))
            elif draw.random() < 0.3:
                api.abandon(batch)
            monthly.clock.now = max(
                NOW, monthly.clock.now + draw.choice([0, 0, 1, 61, 1_800, -900])
            )
    assert len(reported) == len(set(reported))
    assert len(reported) > 4
