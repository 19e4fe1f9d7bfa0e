"""Pools of worker processes for cryptography, which holds the interpreter's lock."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor

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
