"""The life of a batch, as one table.

    open --fill--> sealed --forward--> forwarded --acknowledge--> acknowledged --erase--> erased
    open, sealed --abandon--> abandoned        open --expire--> abandoned

``fill`` happens inside the transaction that stores the n-th distinct report. A batch that is short
has no way to ``forwarded``: from ``open`` only ``fill`` leads on, everything else ends in
``abandoned``. Once messages have left (``forwarded``) a batch cannot be abandoned, since what was
handed over counts as used.

An event whose target is the present state is a repetition (a lost answer, a retry) and changes
nothing.
"""

from typing import Literal

from common.errors import RemoteError
from common.wire import BatchState

Event = Literal["fill", "expire", "abandon", "forward", "acknowledge", "erase"]

TRANSITIONS: dict[tuple[BatchState, Event], BatchState] = {
    ("open", "fill"): "sealed",
    ("open", "expire"): "abandoned",
    ("open", "abandon"): "abandoned",
    ("sealed", "abandon"): "abandoned",
    ("sealed", "forward"): "forwarded",
    ("forwarded", "forward"): "forwarded",
    ("forwarded", "acknowledge"): "acknowledged",
    ("acknowledged", "acknowledge"): "acknowledged",
    ("acknowledged", "erase"): "erased",
    ("erased", "acknowledge"): "erased",
    ("erased", "erase"): "erased",
    ("abandoned", "abandon"): "abandoned",
    ("abandoned", "expire"): "abandoned",
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
        return (state, "abandon") not in TRANSITIONS
    return ORDER.index(state) >= ORDER.index(wanted)
