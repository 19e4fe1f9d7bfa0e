"""What happens in a run, as events that a client can follow and resume.

Events are written in the transaction of what they tell, numbered 1, 2, ... in each run. A stream
sends those after ``Last-Event-ID`` and then waits for more until the run is over.
"""

import asyncio
import contextlib
from typing import Any, Literal

EventKind = Literal[
    "run_started",
    "deployment_issued",
    "batch_sealed",
    "batch_counted",
    "batch_rejected",
    "batch_abandoned",
    "stage_finished",
    "run_finished",
    "run_failed",
    "run_stopped",
]
LAST = ("run_finished", "run_failed", "run_stopped")

STOPPED = "stopped "
"""News (`common.server.statements`) between replicas: a run's id, of which something happened, or
this before it when it was stopped by hand."""

RECHECK_SECONDS = 5.0
"""Who waits looks again this often, as news of other replicas may be lost,"""
STILL_SECONDS = 30.0
"""and this often where there are none."""

Event = tuple[EventKind, dict[str, Any]]


class Bell:
    """Wakes whoever waits for news of a run in this process.

    Take the ticket *before* looking at the store, then wait on it: news in between is not missed.
    After ``pause`` seconds, look again all the same.
    """

    def __init__(self, *, shared: bool = False) -> None:
        """``shared``: other replicas change the same store."""
        self.pause = RECHECK_SECONDS if shared else STILL_SECONDS
        self._tickets: dict[str, asyncio.Event] = {}
        self.closed = False

    def ticket(self, run_id: str) -> asyncio.Event:
        """An event that the next `ring` of this run sets."""
        return self._tickets.setdefault(run_id, asyncio.Event())

    def ring(self, run_id: str) -> None:
        """Wake all who hold a ticket of this run."""
        ticket = self._tickets.pop(run_id, None)
        if ticket is not None:
            ticket.set()

    def ring_all(self) -> None:
        """Wake everyone: news may have been missed."""
        for run_id in list(self._tickets):
            self.ring(run_id)

    def close(self) -> None:
        """Wake everyone for the last time: the service stops, do not wait again."""
        self.closed = True
        self.ring_all()


async def wait(ticket: asyncio.Event, seconds: float) -> None:
    """Return when the ticket is called or the time is over."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ticket.wait(), seconds)
