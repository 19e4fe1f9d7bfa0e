"""Pools of worker processes for cryptography, which holds the interpreter's lock.

Blocking work beside the event loop.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

SPAWN = multiprocessing.get_context("spawn")
"""Processes are spawned, not forked: the parent has threads and an event loop."""


def process_pool(workers: int) -> ProcessPoolExecutor:
    """Worker processes that leave Ctrl-C to their parent and never outlive one that was killed."""
    return ProcessPoolExecutor(workers, mp_context=SPAWN, initializer=enter_worker)


def enter_worker() -> None:
    """What such a process does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run blocking work in a thread; when cancelled, leave only after it ended.

    So a driver that is stopped has no transaction under way when another takes its place.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.exception()  # looked at, so that asyncio does not complain; the step is done again
        raise
