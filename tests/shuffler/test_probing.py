"""A node that asks in order to learn who took part or when, or to block somebody."""

import pytest

from tests.shuffler.conftest import Api, both_engines
from tests.shuffler.test_reports import refusals
from tests.shuffler.world import user


def test_a_batch_that_is_over_refuses_everybody_alike(api: Api) -> None:
    """It is closed before anybody is looked up, also to the nodes of its members' owner."""
    batch = api.deposit()
    api.fill(batch)
    _, fellow = api.enrol(1, "owner")
    for finish in (lambda: None, lambda: api.finish(batch)):
        finish()
        for token in (api.token, fellow):
            assert set(refusals(api, batch, [user(i) for i in range(8)], token)) == {"batch-full"}


@both_engines
def test_an_owner_neither_finds_nor_locks_out_users_of_another(api: Api) -> None:
    batch, other = api.deposit(n=8), api.deposit(deployment=1)
    _, prober = api.enrol(100, "mallory")
    people = [user(i) for i in range(4)]
    assert len(api.leases(other, people, prober)) == 4  # named first, by somebody else
    held = api.leases(batch, people)
    assert (
        api.outcomes(batch, [(lease.lease, batch.report()) for lease in held]) == ["accepted"] * 4
    )
    api.clock.now += 60
    strangers = [user(i) for i in range(10, 12)]
    assert len(api.leases(batch, [*people[:2], *strangers], prober)) == 4, "all alike"


def test_users_who_reported_and_users_who_may_be_running_are_refused_alike(api: Api) -> None:
    batch, other = api.deposit(), api.deposit(deployment=1)
    done, _ = api.leases(batch, [user(0), user(1)])
    api.outcomes(batch, [(done.lease, batch.report())])
    assert refusals(api, other, [user(0), user(1)]) == ["user-unavailable"] * 2
    _, fellow = api.enrol(10, "owner")
    assert refusals(api, batch, [user(0), user(1)], fellow) == ["user-unavailable"] * 2


def test_a_node_without_room_learns_nothing_of_users(api: Api) -> None:
    batch = api.deposit_shared(0.25)
    held = api.leases(batch, [user(0), user(1)])
    api.outcomes(batch, [(held[0].lease, batch.report())])
    assert refusals(api, batch, [user(0), user(2)]) == ["share-exceeded"] * 2
    assert api.leases(batch, [user(1)]) == held[1:], "what it has it keeps"


@pytest.mark.parametrize(("n", "most"), [(4, 2), (100, 11), (230, 11)])
def test_free_slots_are_told_in_coarse_steps(api: Api, n: int, most: int) -> None:
    """So that a fellow node's list of batches is no clock of single leases."""
    batch = api.deposit(n)
    shown = []
    for number in range(n + 1):
        (row,) = api.call("GET", "/batches", api.token).json()["batches"]
        assert row["free_slots"] >= n - number, "else the last slots would not be asked for"
        shown.append(row["free_slots"])
        if number < n:
            api.leases(batch, [user(number)])
    assert shown == sorted(shown, reverse=True)
    assert len(set(shown)) <= most
    assert (shown[0], shown[n - 1] > 0, shown[n]) == (n, True, 0)
