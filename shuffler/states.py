"""The states of batches and of leases: two tables (state, event) -> state.

Batches:

    open --fill--> sealed --forward--> forwarded --acknowledge--> acknowledged --erase--> erased
    open --abandon, expire--> abandoned        open, sealed --lost--> abandoned
    sealed --retire--> abandoned               forwarded --retire--> acknowledged

``fill`` happens in the transaction that stores the n-th distinct report. Callers can abandon only
an open batch, because a full batch has used up the only report of n people. A full batch is given
up only if its secret is lost (``lost``), or if nobody fetches its messages in time (``retire``). A
forwarded batch is never abandoned, because the analyzer may have used its messages. If a forwarded
batch is retired, it is erased as if the analyzer had acknowledged it.

Leases:

    held --report--> reported                  held --supersede--> superseded
    held, superseded --reassign--> lost        held, superseded, lost --forget--> forgotten

A held lease may report until it expires. If a user gets a newer lease, the user's older lease is
superseded: it keeps its slot but may not report. A lease is lost when it has expired and its slot
goes to another user. A lease without a report is forgotten when its batch ends. No event leads out
of ``reported``, so nothing gives a user a second report.

An event that leads to the current state is a repetition (such as a retry after a lost answer) and
changes nothing.
"""

from typing import Literal

from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.wire import BatchState

Event = Literal["fill", "expire", "abandon", "lost", "retire", "forward", "acknowledge", "erase"]

TRANSITIONS: dict[tuple[BatchState, Event], BatchState] = {
    ("open", "fill"): "sealed",
    ("open", "expire"): "abandoned",
    ("open", "abandon"): "abandoned",
    ("open", "lost"): "abandoned",
    ("sealed", "lost"): "abandoned",
    ("sealed", "retire"): "abandoned",
    ("sealed", "forward"): "forwarded",
    ("forwarded", "forward"): "forwarded",
    ("forwarded", "acknowledge"): "acknowledged",
    ("forwarded", "retire"): "acknowledged",
    ("acknowledged", "acknowledge"): "acknowledged",
    ("acknowledged", "erase"): "erased",
    ("erased", "acknowledge"): "erased",
    ("erased", "erase"): "erased",
    ("abandoned", "abandon"): "abandoned",
    ("abandoned", "expire"): "abandoned",
    ("abandoned", "lost"): "abandoned",
    ("abandoned", "retire"): "abandoned",
}

ORDER: tuple[BatchState, ...] = ("open", "sealed", "forwarded", "acknowledged", "erased")

LeaseState = Literal["held", "reported", "superseded", "lost", "forgotten"]
LeaseEvent = Literal["report", "supersede", "reassign", "forget"]

LEASE_TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    ("held", "report"): "reported",
    ("held", "supersede"): "superseded",
    ("held", "reassign"): "lost",
    ("held", "forget"): "forgotten",
    ("superseded", "supersede"): "superseded",
    ("superseded", "reassign"): "lost",
    ("superseded", "forget"): "forgotten",
    ("lost", "supersede"): "lost",
    ("lost", "forget"): "forgotten",
    ("forgotten", "forget"): "forgotten",
}


def after(state: BatchState, event: Event) -> BatchState:
    """Returns the state of a batch after ``event``.

    If there is no such transition, raises RemoteError: ``batch-not-ready`` while the batch fills,
    ``late`` for a hand-over after the batch's end, ``wrong-state`` otherwise.
    """
    target = TRANSITIONS.get((state, event))
    if target is not None:
        return target
    if state == "open":
        raise RemoteError("batch-not-ready", "the batch is not full; it is never released short")
    if event == "forward":
        raise RemoteError("late", f"the batch is {state}; its messages can no longer be fetched")
    raise RemoteError("wrong-state", f"'{event}' is not possible for a batch that is {state}")


def lease_after(state: LeaseState, event: LeaseEvent) -> LeaseState:
    """Returns a lease's state after ``event``; raises LocalError if there is no such transition."""
    target = LEASE_TRANSITIONS.get((state, event))
    if target is None:
        raise LocalError("internal", f"'{event}' is not possible for a lease that is {state}")
    return target


def reached(state: BatchState, wanted: BatchState) -> bool:
    """Returns whether a batch has reached the state ``wanted``, or can no longer reach it."""
    if state == "abandoned":
        return True
    if wanted == "abandoned":
        return all(
            target != wanted for (source, _), target in TRANSITIONS.items() if source == state
        )
    return ORDER.index(state) >= ORDER.index(wanted)
