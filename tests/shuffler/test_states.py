"""The transition table, every pair of it, against a second statement of it."""

from itertools import product
from typing import get_args

import pytest

from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.messages import BatchState
from riffle.shuffler.states import ORDER, TRANSITIONS, Event, after, reached

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


def expected() -> dict[tuple[str, str], str | None]:
    header, *rows = (line.split() for line in EXPECTED.strip().splitlines())
    return {
        (row[0], event): {".": None, "=": row[0]}.get(cell, cell)
        for row in rows
        for event, cell in zip(header[1:], row[1:], strict=True)
    }


def test_the_table_covers_every_state_and_event() -> None:
    assert set(expected()) == set(product(STATES, EVENTS))


@pytest.mark.parametrize(("state", "event"), list(product(STATES, EVENTS)))
def test_every_pair(state: BatchState, event: Event) -> None:
    target = expected()[state, event]
    if target is None:
        with pytest.raises(RemoteError):
            after(state, event)
    else:
        assert after(state, event) == target


def test_a_short_batch_has_no_way_to_release() -> None:
    """From open, without ``fill``, only abandoned can be reached."""
    found: set[BatchState] = {"open"}
    edge = set(found)
    while edge:
        edge = {t for (s, e), t in TRANSITIONS.items() if s in edge and e != "fill"} - found
        found |= edge
    assert found == {"open", "abandoned"}


def test_what_is_complete_cannot_be_abandoned() -> None:
    assert all((state, "abandon") not in TRANSITIONS for state in ORDER[1:])


def test_what_has_left_is_never_called_abandoned() -> None:
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
