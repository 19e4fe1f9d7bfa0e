"""Work outside the event loop: worker processes for cryptography, threads for blocking calls."""

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

SPAWN = multiprocessing.get_context("spawn")
"""Processes are spawned, not forked: the parent has threads and an event loop."""

# Inherited by the process that cleans up after a killed worker, which would warn in plain text.
sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")

P = ParamSpec("P")
T = TypeVar("T")


def process_pool(workers: int) -> ProcessPoolExecutor:
    """Returns a pool of worker processes for cryptography, which holds the GIL."""
    return ProcessPoolExecutor(workers, mp_context=SPAWN, initializer=initialize_worker)


def initialize_worker() -> None:
    """Ignores Ctrl-C, which the parent handles; exits when the parent ends, even by a kill."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs blocking work in a thread; if cancelled, it returns only after the work has ended.

    So when another driver takes the place of a stopped one, the first has no open transaction.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.exception()  # mark the error as seen, so asyncio does not log it; the step is repeated
        raise
