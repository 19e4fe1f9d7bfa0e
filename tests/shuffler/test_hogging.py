"""A node that takes slots and never reports, among honest ones (finding A4)."""

import pytest

from riffle.shuffler.rules import waits_until
from tests.shuffler.conftest import Api, both_engines
from tests.shuffler.test_reports import refusals
from tests.shuffler.world import NOW, Batch, user

N, LIFE = 200, 60


def ask(api: Api, batch: Batch, first: int, count: int, token: str) -> list[str]:
    """The leases that a node gets for so many users who are new."""
    people = [user(first + number) for number in range(count)]
    return [lease["lease"] for lease in api.lease(batch, people, token).json()["leases"]]


@both_engines
@pytest.mark.parametrize("hogs", [1, 3])
def test_a_batch_fills_beside_an_owner_who_never_reports(api: Api, hogs: int) -> None:
    """The owner, at each of their nodes, asks for all it may hold, and always before the others."""
    batch = api.deposit_shared(0.25, N)
    hogging = [api.enrol(10_000, "mallory")[1] for _ in range(hogs)]
    honest = [api.enrol(10_000)[1] for _ in range(4)]
    asked, taken = 0, []
    for _ in range(6):  # lives of a lease
        for token in [*hogging, *honest]:
            leases = ask(api, batch, asked, N // 4, token)
            asked += N // 4
            if token in honest:
                frames = [(lease, batch.report()) for lease in leases]
                assert not frames or set(api.outcomes(batch, frames, token)) == {"accepted"}
            else:
                taken.append(len(leases))
        api.clock.now += LIFE
    status = api.status(batch)
    assert (status["state"], status["reports"]) == ("sealed", N)
    assert sum(taken) == N // 4, "its share once, and after the wait there is nothing left"
    assert len(api.finish(batch)) == N * batch.context.descriptor.padding.messages


@pytest.mark.parametrize("episode_seconds", [None, 600])
def test_an_owner_waits_longer_each_time(api: Api, episode_seconds: int | None) -> None:
    """Measured in lives of a lease, which include the time of a person's episode."""
    end = NOW + 86_400
    batch = api.deposit_shared(0.5, episode_seconds=episode_seconds, expires_at=end)
    granted = []
    for half in range(62):
        leases = ask(api, batch, 10 * half, 4, api.token)
        granted += [half / 2] * bool(leases)
        api.clock.now += (LIFE + (episode_seconds or 0)) / 2
    assert granted == [0, 2, 6, 14, 30]


def test_slots_that_others_took_over_have_lapsed_all_the_same(api: Api) -> None:
    batch = api.deposit_shared(0.5)
    _, other = api.enrol(100)
    assert len(ask(api, batch, 0, 4, api.token)) == 4
    api.clock.now += LIFE
    assert len(ask(api, batch, 10, 4, other)) == 4, "in the expired slots"
    assert ask(api, batch, 20, 4, api.token) == [], "the other four are free, but it has to wait"
    api.clock.now += LIFE
    assert len(ask(api, batch, 20, 4, api.token)) == 4


def test_all_nodes_of_an_owner_wait_also_after_a_restart(api: Api) -> None:
    batch = api.deposit_shared(0.5)
    _, fellow = api.enrol(100, "owner")
    assert len(ask(api, batch, 0, 4, api.token)) == 4
    api.clock.now += LIFE
    later, other = api.enrol(100, "owner")[1], api.enrol(100)[1]
    for _ in range(2):
        for token in (api.token, fellow, later):
            assert ask(api, batch, 10, 4, token) == []
        api.restart()
    assert len(ask(api, batch, 20, 4, other)) == 4
    api.clock.now += LIFE
    assert len(ask(api, batch, 10, 4, fellow)) == 4, "the wait of the owner is over"


def test_asking_again_makes_no_lease_longer(api: Api) -> None:
    batch = api.deposit_shared(0.5)
    people = [user(number) for number in range(4)]
    held = api.leases(batch, people)
    for _ in range(2):
        api.clock.now += LIFE // 2 - 1
        assert api.leases(batch, people) == held
    api.clock.now += 2
    assert refusals(api, batch, people) == ["share-exceeded"] * 4, "they have lapsed"


def test_an_owner_whose_leases_lapse_seldom_need_not_wait(api: Api) -> None:
    batch, other = api.deposit_shared(0.5, 40), api.deposit_shared(0.5, 40, deployment=1)
    leases = ask(api, batch, 0, 11, api.token)
    api.outcomes(batch, [(lease, batch.report()) for lease in leases[:10]])
    api.clock.now += LIFE
    assert len(ask(api, batch, 20, 1, api.token)) == 1
    assert len(ask(api, other, 30, 11, api.token)) == 11
    api.clock.now += LIFE  # two of eleven have lapsed here, all of eleven there
    assert refusals(api, batch, [user(50)]) == ["share-exceeded"]
    assert refusals(api, other, [user(50)]) == ["share-exceeded"]
    _, token = api.enrol(10)
    assert len(ask(api, other, 60, 10, token)) == 10, "another owner's leases are their own affair"


def test_a_wait_doubles_and_ends() -> None:
    assert waits_until(0, (0, 0, 0), 60) == 0
    assert waits_until(9, (1, 100, 100), 60) == 160
    assert waits_until(10, (1, 100, 100), 60) == 0
    assert waits_until(0, (2, 100, 220), 60) == 400
