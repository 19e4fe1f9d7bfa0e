"""Worker processes for cryptography, threads for blocking calls, and a limited wait for tasks."""

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

SPAWN = multiprocessing.get_context("spawn")
"""Processes are spawned, not forked: the parent has threads and an event loop."""

# Python's resource tracker inherits this option. Without it, the tracker would warn about a killed
# worker in plain text, not in JSON lines.
sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")

P = ParamSpec("P")
T = TypeVar("T")


def process_pool(workers: int) -> ProcessPoolExecutor:
    """Returns a pool of worker processes. Cryptography holds the GIL, so threads would not help."""
    return ProcessPoolExecutor(workers, mp_context=SPAWN, initializer=initialize_worker)


def initialize_worker() -> None:
    """Ignores Ctrl-C, which the parent handles; exits when the parent ends or is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs blocking work in a thread; if cancelled, returns only after the work has ended.

    A cancelled task thus has no open transaction when another task takes its place.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.exception()  # mark the error as seen, so that asyncio does not log it
        raise


async def finish(tasks: Collection[asyncio.Task[None]], seconds: float) -> None:
    """Waits at most ``seconds`` for tasks, and then cancels those that still run."""
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
