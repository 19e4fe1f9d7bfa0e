"""Events of a run, which clients can follow, and the signals that wake these followers.

A run's events are numbered 1, 2, ... Each event is written in the transaction of the change that it
reports. A stream sends the events after ``Last-Event-ID`` and waits for more until the run is over.
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
Event = tuple[EventKind, dict[str, Any]]

STOPPED = "stopped "
"""A notification is a run's id. If the run was stopped, this text precedes the id."""

SHARED_RECHECK_SECONDS = 5.0
"""Seconds until waiters read a shared store again, because a notification may be lost."""
ALONE_RECHECK_SECONDS = 30.0
"""Seconds until waiters read the store again if only this process writes to it."""


class ChangeSignals:
    """Wakes the waiters in this process when a run changes.

    A waiter takes a signal *before* it reads the store. So it misses no change after the read. In
    any case, it reads again after ``recheck_seconds``. ``closed`` means that the service is
    stopping.
    """

    def __init__(self, *, shared: bool = False) -> None:
        """Prepares the signals. ``shared`` says whether other replicas change the same store."""
        self.recheck_seconds = SHARED_RECHECK_SECONDS if shared else ALONE_RECHECK_SECONDS
        self._signals: dict[str, asyncio.Event] = {}
        self.closed = False

    def signal(self, run_id: str) -> asyncio.Event:
        """Returns the event that the run's next change sets."""
        return self._signals.setdefault(run_id, asyncio.Event())

    def fire(self, run_id: str) -> None:
        """Wakes all waiters of a run."""
        signal = self._signals.pop(run_id, None)
        if signal is not None:
            signal.set()

    def fire_all(self) -> None:
        """Wakes the waiters of all runs, because a notification may have been missed."""
        for run_id in list(self._signals):
            self.fire(run_id)

    def close(self) -> None:
        """Wakes all waiters for the last time."""
        self.closed = True
        self.fire_all()


async def wait(signal: asyncio.Event, seconds: float) -> None:
    """Returns when the signal fires or the time is over."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(signal.wait(), seconds)
