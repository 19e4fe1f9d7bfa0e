"""Grants without a store: what becomes of leases that share a row. With one: test_reports."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from riffle.shuffler.store.leases import Grant, grant_id, read_slots, write_slots
from tests.shuffler.world import NOW

ID = "ab" * 8
STEPS = st.lists(
    st.tuples(st.sampled_from(["report", "void", "lose"]), st.integers(0, 5)), max_size=12
)


def people(k: int) -> list[str]:
    return [f"{number + 1:032x}" for number in range(k)]


def grant(slots: list[int]) -> Grant:
    return Grant.fresh(ID, "b", "n", NOW + 10, people(len(slots)), slots)


def stored(one: Grant) -> Grant:
    """The same from its row."""
    row = one.row()
    names = ("grant_id", "batch_id", "node_id", "expires_at", "slots", "states", "users", "digests")
    return Grant.stored(*(row[name] for name in names))  # type: ignore[arg-type]


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=6, unique=True), STEPS)
def test_leases_that_share_a_row_are_leases_of_their_own(
    numbers: list[int], steps: list[tuple[str, int]]
) -> None:
    """Against a dictionary of leases: slot -> how it stands."""
    slots = sorted(numbers)
    one, model = grant(slots), dict.fromkeys(slots, "live")
    holding = set(slots)
    for step, number in steps:
        place = number % len(slots)
        slot = slots[place]
        if step == "report" and model[slot] == "live":
            one.report(place, hashlib.sha256(bytes([place])).digest())
            model[slot] = "reported"
            holding.discard(slot)
        elif step == "void" and model[slot] == "live":
            one.void(place)
            model[slot] = "over"
        elif step == "lose":
            lost = one.lose(number)
            assert lost == sorted(holding)[:number]
            holding.difference_update(lost)
            model.update(dict.fromkeys(lost, "over"))
        one = stored(one)
    found = [one.find(one.lease(slot)) for slot in slots]
    assert found == list(range(len(slots)))
    assert [one.standing(place, NOW) for place in range(len(slots))] == list(model.values())
    assert [one.user(place) for place in range(len(slots))] == people(len(slots))
    assert one.row()["pending"] == len(holding)
    reported = [place for place, slot in enumerate(slots) if model[slot] == "reported"]
    assert one.row()["reports"] == len(reported)
    for place in reported:
        assert one.digest(place) == hashlib.sha256(bytes([place])).digest()
    late = [one.standing(place, NOW + 10) for place in range(len(slots))]
    assert "live" not in late
    assert late.count("reported") == len(reported)
    assert one.all_live(NOW) == ("over" not in model.values())
    assert not one.all_live(NOW + 10)


def test_unused_leases_are_forgotten() -> None:
    one = grant([3, 4, 9])
    one.report(1, bytes(32))
    one.lose(1)
    one.forget_unused()
    assert [one.find(one.lease(slot)) for slot in (3, 4, 9)] == [None, 1, None]
    assert one.row()["users"] == bytes(16) + bytes.fromhex(people(2)[1]) + bytes(16)


def test_a_lease_says_its_grant_and_its_slot() -> None:
    one = grant([7, 8])
    lease = one.lease(8)
    assert (len(lease), grant_id(lease), one.find(lease)) == (32, ID, 1)
    assert one.find(one.lease(9)) is None


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_slots_are_read_as_they_were_written(slots: list[int]) -> None:
    assert read_slots(write_slots(slots)) == slots
