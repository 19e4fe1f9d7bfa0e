"""The states of batches and of leases: two tables (state, event) -> state.

Batches:

    open --fill--> sealed --forward--> forwarded --acknowledge--> acknowledged --erase--> erased
    open --abandon, expire--> abandoned        open, sealed --lost--> abandoned
    sealed --retire--> abandoned               forwarded --retire--> acknowledged

``fill`` happens in the transaction that stores the n-th distinct report. A short batch has no way
to ``forwarded``: from ``open`` only ``fill`` leads on, and every other event ends in ``abandoned``.
Only a short batch is abandoned by choice: a complete one has cost n people the one report they
have. A complete batch is given up when its secret is lost (``lost``), since nobody can open it any
more, and when nobody takes it in time (``retire``). Once messages have left (``forwarded``) a batch
is never abandoned, since what was handed over counts as used; when retired, it is erased as if the
analyzer had acknowledged it.

Leases:

    held --report--> reported                  held --supersede--> superseded
    held, superseded --reassign--> lost        held, superseded, lost --forget--> forgotten

A held lease may report until it expires. It is superseded when its user gets a newer lease: then
it keeps its slot but may not report, so a user reports once. It is lost when its expired slot goes
to another user, and forgotten when its batch ends without its report. Nothing follows ``reported``,
so no event takes back a user's one report.

An event whose target is the present state is a repetition (a lost answer, a retry) and changes
nothing.
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

    Without such a transition, raises RemoteError: ``batch-not-ready`` while the batch fills,
    ``late`` for handing over a batch that is over, ``wrong-state`` otherwise.
    """
    target = TRANSITIONS.get((state, event))
    if target is not None:
        return target
    if state == "open":
        raise RemoteError("batch-not-ready", "the batch is not full; it is never released short")
    if event == "forward":
        raise RemoteError("late", f"the batch is {state}; its messages are handed over no more")
    raise RemoteError("wrong-state", f"'{event}' is not possible for a batch that is {state}")


def lease_after(state: LeaseState, event: LeaseEvent) -> LeaseState:
    """Returns the state of a lease after ``event``; raises LocalError without such a transition.

    The shuffler's own code causes these events, so nothing a node sends leads to the error.
    """
    target = LEASE_TRANSITIONS.get((state, event))
    if target is None:
        raise LocalError("internal", f"'{event}' is not possible for a lease that is {state}")
    return target


def reached(state: BatchState, wanted: BatchState) -> bool:
    """Returns whether waiting for ``wanted`` is over: the batch reached it, or never will."""
    if state == "abandoned":
        return True
    if wanted == "abandoned":
        return all(
            target != wanted for (source, _), target in TRANSITIONS.items() if source == state
        )
    return ORDER.index(state) >= ORDER.index(wanted)
