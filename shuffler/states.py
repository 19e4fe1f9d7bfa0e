"""The life of a batch, as one table.

    open --fill--> sealed --forward--> forwarded --acknowledge--> acknowledged --erase--> erased
    open --abandon, expire--> abandoned        open, sealed --lost--> abandoned
    sealed --retire--> abandoned               forwarded --retire--> acknowledged

``fill`` happens inside the transaction that stores the n-th distinct report. A batch that is short
has no way to ``forwarded``: from ``open`` only ``fill`` leads on, everything else ends in
``abandoned``. Only a short batch is abandoned by choice: a complete one has cost n people the one
report they have. It is given up when its secret is lost, since nobody can open it any more, and
when its time to be taken is over (``retire``). Once messages have left (``forwarded``) a batch is
never abandoned, since what was handed over counts as used; retired, it is erased as if the analyzer
had acknowledged it.

An event whose target is the present state is a repetition (a lost answer, a retry) and changes
nothing.
"""

from typing import Literal

from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.messages import BatchState

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


def after(state: BatchState, event: Event) -> BatchState:
    """State after ``event``.

    Raises:
        RemoteError: the table has no such transition: ``batch-not-ready`` while the batch fills,
            ``late`` for handing over what is over, ``wrong-state`` otherwise.
    """
    target = TRANSITIONS.get((state, event))
    if target is not None:
        return target
    if state == "open":
        raise RemoteError("batch-not-ready", "the batch is not full; it is never released short")
    if event == "forward":
        raise RemoteError("late", f"the batch is {state}; its messages are handed over no more")
    raise RemoteError("wrong-state", f"'{event}' is not possible for a batch that is {state}")


def reached(state: BatchState, wanted: BatchState) -> bool:
    """Whether waiting for ``wanted`` is over: it was reached, or never will be."""
    if state == "abandoned":
        return True
    if wanted == "abandoned":
        return all(
            target != wanted for (source, _), target in TRANSITIONS.items() if source == state
        )
    return ORDER.index(state) >= ORDER.index(wanted)
