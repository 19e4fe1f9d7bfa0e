"""The transition tables, every pair of them, against a second statement of them."""

from itertools import product
from typing import get_args

import pytest

from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.wire import BatchState
from riffle.shuffler.states import (
    LEASE_TRANSITIONS,
    ORDER,
    TRANSITIONS,
    Event,
    LeaseEvent,
    LeaseState,
    after,
    lease_after,
    reached,
)

STATES: tuple[BatchState, ...] = get_args(BatchState)
EVENTS: tuple[Event, ...] = get_args(Event)

# One line a state; columns in the order of EVENTS; '.' means refused, '=' stays.
EXPECTED = """
state         fill    expire     abandon    lost       retire        forward    acknowledge   erase
open          sealed  abandoned  abandoned  abandoned  .             .          .             .
sealed        .       .          .          abandoned  abandoned     forwarded  .             .
forwarded     .       .          .          .          acknowledged  =          acknowledged  .
acknowledged  .       .          .          .          .             .          =             erased
erased        .       .          .          .          .             .          =             =
abandoned     .       =          =          =          =             .          .             .
"""


LEASE_STATES: tuple[LeaseState, ...] = get_args(LeaseState)
LEASE_EVENTS: tuple[LeaseEvent, ...] = get_args(LeaseEvent)

EXPECTED_LEASES = """
state       report    supersede   reassign  forget
held        reported  superseded  lost      forgotten
reported    .         .           .         .
superseded  .         =           lost      forgotten
lost        .         =           .         forgotten
forgotten   .         .           .         =
"""


def expected(table: str = EXPECTED) -> dict[tuple[str, str], str | None]:
    header, *rows = (line.split() for line in table.strip().splitlines())
    return {
        (row[0], event): {".": None, "=": row[0]}.get(cell, cell)
        for row in rows
        for event, cell in zip(header[1:], row[1:], strict=True)
    }


def test_the_tables_cover_every_state_and_event() -> None:
    assert set(expected()) == set(product(STATES, EVENTS))
    assert set(expected(EXPECTED_LEASES)) == set(product(LEASE_STATES, LEASE_EVENTS))


@pytest.mark.parametrize(("state", "event"), list(product(STATES, EVENTS)))
def test_every_pair_of_the_batch_table(state: BatchState, event: Event) -> None:
    target = expected()[state, event]
    if target is None:
        with pytest.raises(RemoteError):
            after(state, event)
    else:
        assert after(state, event) == target


@pytest.mark.parametrize(("state", "event"), list(product(LEASE_STATES, LEASE_EVENTS)))
def test_every_pair_of_the_lease_table(state: LeaseState, event: LeaseEvent) -> None:
    target = expected(EXPECTED_LEASES)[state, event]
    if target is None:
        with pytest.raises(LocalError):
            lease_after(state, event)
    else:
        assert lease_after(state, event) == target


def test_a_lease_reports_at_most_once_and_from_held_only() -> None:
    """All but the newest lease of a user are superseded, so at most one reports."""
    assert [pair for pair, state in LEASE_TRANSITIONS.items() if state == "reported"] == [
        ("held", "report")
    ]
    assert "held" not in LEASE_TRANSITIONS.values()
    assert not any(state == "reported" for state, _ in LEASE_TRANSITIONS)


def test_a_short_batch_has_no_way_to_release() -> None:
    """From open, without ``fill``, only abandoned can be reached."""
    found: set[BatchState] = {"open"}
    edge = set(found)
    while edge:
        edge = {t for (s, e), t in TRANSITIONS.items() if s in edge and e != "fill"} - found
        found |= edge
    assert found == {"open", "abandoned"}


def test_a_complete_batch_cannot_be_abandoned() -> None:
    assert all((state, "abandon") not in TRANSITIONS for state in ORDER[1:])


def test_a_batch_whose_messages_have_left_is_never_abandoned() -> None:
    assert all(TRANSITIONS.get((s, e)) != "abandoned" for s, e in product(ORDER[2:], EVENTS))


@pytest.mark.parametrize(
    ("state", "event", "slug"),
    [
        ("open", "forward", "batch-not-ready"),
        ("open", "acknowledge", "batch-not-ready"),
        ("erased", "forward", "late"),
        ("abandoned", "forward", "late"),
        ("abandoned", "acknowledge", "wrong-state"),
        ("sealed", "acknowledge", "wrong-state"),
        ("sealed", "abandon", "wrong-state"),
        ("forwarded", "abandon", "wrong-state"),
        ("forwarded", "lost", "wrong-state"),
    ],
)
def test_refusals_say_why(state: BatchState, event: Event, slug: str) -> None:
    with pytest.raises(RemoteError) as caught:
        after(state, event)
    assert caught.value.slug == slug


@pytest.mark.parametrize(("state", "wanted"), list(product(STATES, STATES)))
def test_waiting_ends_when_a_state_is_reached_or_never_will_be(
    state: BatchState, wanted: BatchState
) -> None:
    if state == "abandoned":
        assert reached(state, wanted)
    elif wanted == "abandoned":
        assert reached(state, wanted) == (state not in ("open", "sealed"))
    else:
        assert reached(state, wanted) == (ORDER.index(state) >= ORDER.index(wanted))
