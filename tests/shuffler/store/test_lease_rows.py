"""Lease groups without a store: the life of leases that share a row. With a store: test_reports."""

import hashlib
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from riffle.shuffler.states import LeaseState
from riffle.shuffler.store.lease_rows import LETTERS, LeaseGroup, group_of, read_slots, write_slots
from tests.shuffler.world import NOW

STEPS = st.lists(
    st.tuples(st.sampled_from(["report", "supersede", "reassign"]), st.integers(0, 5)), max_size=12
)


def people(k: int) -> list[str]:
    return [f"{number + 1:032x}" for number in range(k)]


def new_group(slots: list[int]) -> LeaseGroup:
    return LeaseGroup.new("b", "n", NOW + 10, slots, people(len(slots)))


def reread(group: LeaseGroup) -> LeaseGroup:
    """The same group from its row."""
    row = group.row()
    names = ("group_id", "batch_id", "node_id", "expires_at", "slots", "states", "users", "digests")
    return LeaseGroup.from_row([row[name] for name in names])


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=6, unique=True), STEPS)
def test_leases_that_share_a_row_are_leases_of_their_own(
    numbers: list[int], steps: list[tuple[str, int]]
) -> None:
    """Against a dictionary of leases: slot -> standing."""
    slots = sorted(numbers)
    group, model = new_group(slots), dict.fromkeys(slots, "live")
    holding = set(slots)
    for step, number in steps:
        index = number % len(slots)
        slot = slots[index]
        if step == "report" and model[slot] == "live":
            group.report(index, hashlib.sha256(bytes([index])).digest())
            model[slot] = "reported"
            holding.discard(slot)
        elif step == "supersede" and model[slot] == "live":
            group.supersede(index)
            model[slot] = "over"
        elif step == "reassign":
            lost = group.reassign(number)
            assert lost == sorted(holding)[:number]
            holding.difference_update(lost)
            model.update(dict.fromkeys(lost, "over"))
        group = reread(group)
    indices = list(range(len(slots)))
    assert [group.index(group.lease_id(slot)) for slot in slots] == indices
    assert [group.standing(index, NOW) for index in indices] == list(model.values())
    assert [group.user(index) for index in indices] == people(len(slots))
    assert group.row()["pending"] == len(holding)
    reported = [index for index, slot in enumerate(slots) if model[slot] == "reported"]
    assert group.row()["reports"] == len(reported)
    for index in reported:
        assert group.digest(index) == hashlib.sha256(bytes([index])).digest()
    late = [group.standing(index, NOW + 10) for index in indices]
    assert "live" not in late
    assert late.count("reported") == len(reported)
    assert group.all_live(NOW) == ("over" not in model.values())
    assert not group.all_live(NOW + 10)


def test_unused_leases_are_forgotten() -> None:
    group = new_group([3, 4, 9])
    group.report(1, bytes(32))
    group.reassign(1)
    group.forget_unused()
    assert [group.index(group.lease_id(slot)) for slot in (3, 4, 9)] == [None, 1, None]
    assert group.row()["users"] == bytes(16) + bytes.fromhex(people(2)[1]) + bytes(16)


def test_a_lease_id_has_its_group_and_its_slot() -> None:
    group = new_group([7, 8])
    lease = group.lease_id(8)
    assert (len(lease), group_of(lease), group.index(lease)) == (32, group.group_id, 1)
    assert group.index(group.lease_id(9)) is None


def test_every_lease_state_has_its_letter() -> None:
    """The letters are the database's format: they never change."""
    assert tuple(LETTERS) == get_args(LeaseState)
    assert "".join(LETTERS.values()) == "hrvlf"


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_slots_are_read_as_they_were_written(slots: list[int]) -> None:
    assert read_slots(write_slots(slots)) == slots
