"""Processes that open messages, each with a thread here that hands it work.

Through a `ProcessPoolExecutor` a chunk of messages is copied, pickled and passed by two threads
more, which all of its workers share. Here it goes into a process's pipe as it is: 0.03 us of a core
a message instead of 0.07.
"""

import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar, cast

from riffle.common.workers import SPAWN, enter_worker

P = ParamSpec("P")
T = TypeVar("T")


class Openers(ThreadPoolExecutor):
    """Calls functions in processes: of the arguments, the last is a buffer, and becomes bytes.

    Who called for a process that died gets BrokenExecutor, and so does all that its thread is given
    from then on. A process ends with its thread, and never outlives this one.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers, initializer=self._start)
        self._own = threading.local()

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `concurrent.futures.Executor`."""
        return super().submit(partial(self._ask, work, *args, **kwargs))

    def _start(self) -> None:
        ours, theirs = SPAWN.Pipe()
        with theirs:
            SPAWN.Process(target=_serve, args=(theirs,), daemon=True).start()
        self._own.pipe = ours

    def _ask(self, work: Callable[..., T], *arguments: object, **named: object) -> T:
        pipe: Connection = self._own.pipe
        try:
            pipe.send((work, arguments[:-1], named))
            pipe.send_bytes(cast("bytes", arguments[-1]))
            done, found = pipe.recv()
        except (EOFError, OSError) as error:
            raise BrokenExecutor("a process that opens messages has died") from error
        if not done:
            raise found
        return cast("T", found)


def _serve(pipe: Connection) -> None:
    """Do what is asked until nobody can ask any more."""
    enter_worker()
    while True:
        try:
            work, arguments, named = pipe.recv()
            data = pipe.recv_bytes()
        except EOFError:
            return
        try:
            answer = True, work(*arguments, data, **named)
        except Exception as error:
            answer = False, error
        pipe.send(answer)
