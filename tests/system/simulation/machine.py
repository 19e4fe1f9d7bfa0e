"""Processes that can be killed between any two steps, on a loop whose time is not the clock's.

Everything runs in one thread and one event loop: what goes to a thread or a pool is done at once,
and where nothing is left to do time leaps to the next timer. So a sequence of operations and a seed
decide everything that happens but the bytes that come from the system's CSPRNG.

A step is a commit (one before it, one after), a sync of a file or a directory, or a message that
leaves or arrives. A process whose fuse has burnt down dies at its next step: its tasks are
cancelled, and whatever of it still runs can neither commit, nor write, nor send. A paused process
takes no turn of the loop until it goes on. One whose disk is full has its commits and syncs fail,
and of the file that was to be synced half is there.
"""

import asyncio
import errno
import os
import selectors
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.pool import Pool

from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import writer
from riffle.node_client.users import Users
from riffle.shuffler.store import committer
from riffle.shuffler.store.committer import Committer, Job

T = TypeVar("T")
CURRENT: ContextVar["Process | None"] = ContextVar("process", default=None)
TICK_SECONDS = 1e-9
"""Time goes on in every turn, as it does outside: a timer is due once it is nearer than this, the
loop's resolution, and who waits for what is left until a deadline would wait in the same instant
for ever."""


class Killed(BaseException):
    """The process ends here."""


class Process:
    """Tasks that die together. ``main`` runs until it is killed; ``died`` is called once."""

    def __init__(self, name: str, died: Callable[["Process"], None]) -> None:
        self.name = name
        self.dead = self.full = self.paused = False
        self.fuse: int | None = None
        self.steps = 0
        self.tasks: set[asyncio.Task[Any]] = set()
        self.connections: list[Any] = []
        self.held: list[asyncio.Handle] = []
        self._died = died
        self.context = copy_context()
        self.context.run(CURRENT.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process."""
        return asyncio.get_running_loop().create_task(work, context=self.context)

    def step(self) -> None:
        """Between two things that others can see."""
        self.steps += 1
        if self.fuse is not None and not self.dead:
            self.fuse -= 1
            if self.fuse < 0:
                self.kill()
        if self.dead:
            raise Killed

    def kill(self) -> None:
        """What is under way stops; nothing of this process has any effect from here on."""
        if self.dead:
            return
        self.dead = True
        self.go_on()
        for task in list(self.tasks):
            task.cancel()
        self._died(self)

    def go_on(self) -> None:
        """After a pause: what became due in it is done now."""
        held, self.held, self.paused = self.held, [], False
        loop: Any = asyncio.get_running_loop()
        for handle in held:
            loop._add_callback(handle)

    async def buried(self) -> None:
        """Wait until nothing of a dead process is left, then close its database connections."""
        while self.tasks:
            await asyncio.wait(list(self.tasks))
        for connection in self.connections:
            connection.close()


def step() -> None:
    """A step of whichever process this runs in."""
    process = CURRENT.get()
    if process is not None:
        process.step()


def full() -> bool:
    """Whether the disk of whichever process this runs in is full."""
    process = CURRENT.get()
    return process is not None and process.full


class Inline(ThreadPoolExecutor):
    """Does the work when it is submitted."""

    def __init__(self, _: int = 1) -> None:
        super().__init__(1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class GroupCommitter(Committer):
    """The committer without its thread: what was submitted in one turn of the loop is a group."""

    def __init__(self, engine: Engine) -> None:
        self._engine = writer(engine)
        self._group: list[Job[Any]] = []

    def submit(self, write: Callable[[Connection], T]) -> "Future[T]":
        job: Job[T] = Job(write)
        if not self._group:
            asyncio.get_running_loop().call_soon(self._flush)
        self._group.append(job)
        return job.future

    @property
    def waiting(self) -> int:
        return len(self._group)

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        group, self._group = self._group, []
        alive = [job for job in group if job.future.set_running_or_notify_cancel()]
        with suppress(Killed):  # then whoever waits for an answer is cancelled
            if alive:
                self._commit(alive)


class _Nothing(selectors.SelectSelector):
    """There is no input; a wait for it lets time leap."""

    leap: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again")
        self.leap(timeout + TICK_SECONDS)
        return []


class Loop(asyncio.SelectorEventLoop):
    """An event loop with its own time, in seconds since it was made."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = _Nothing()
        selector.leap = self._leap
        super().__init__(selector)
        self.set_default_executor(Inline())
        self.set_task_factory(_task)

    def time(self) -> float:
        return self._now

    def _leap(self, seconds: float) -> None:
        self._now += seconds

    def _write_to_self(self) -> None:
        """Nobody waits in another thread."""


def _task(loop: Any, work: Any, *, context: Any = None) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    process = context.get(CURRENT) if context is not None else CURRENT.get()
    if process is not None:
        process.tasks.add(task)
        # In the process's own turn: whoever spawned it may be paused.
        task.add_done_callback(process.tasks.discard, context=process.context)
        if process.dead:
            task.cancel()
    return task


def _stepping(work: Callable[..., Any], refuse: Callable[..., Any]) -> Callable[..., Any]:
    """Work with a step before it and after it; a full disk has it refused."""

    def both(*args: Any) -> Any:
        step()
        result = refuse(*args) if full() else work(*args)
        step()
        return result

    return both


def _no_commit(*_: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def _no_sync(descriptor: int) -> None:
    with suppress(OSError):  # a directory has no length
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_users(*_: object) -> None:
    raise LocalError("unavailable", "cannot write users: database or disk is full")


def _unless_paused(run: Callable[[asyncio.Handle], None]) -> Callable[[asyncio.Handle], None]:
    def turn(handle: Any) -> None:
        process = handle._context.get(CURRENT)
        if process is not None and process.paused:
            process.held.append(handle)
        else:
            run(handle)

    return turn


@contextmanager
def one_thread() -> Iterator[None]:
    """What uses threads or syncs does it here and now, in steps."""
    with pytest.MonkeyPatch.context() as patch:
        commit = _stepping(DefaultDialect.do_commit, _no_commit)

        async def here(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return work(*args, **kwargs)

        async def each_here(iterable: Any) -> AsyncIterator[Any]:
            for one in iterable:
                yield one

        def connected(connection: Any, _: object) -> None:
            process = CURRENT.get()
            if process is not None:
                process.connections.append(connection)

        patch.setattr(DefaultDialect, "do_commit", commit)
        patch.setattr(os, "fsync", _stepping(lambda _: None, _no_sync))
        patch.setattr(Users, "_write", _stepping(Users._write, _no_users))
        patch.setattr(asyncio.Handle, "_run", _unless_paused(vars(asyncio.Handle)["_run"]))
        patch.setattr(committer, "Committer", GroupCommitter)
        patch.setattr("fastapi.routing.run_in_threadpool", here)
        patch.setattr("fastapi.dependencies.utils.run_in_threadpool", here)
        patch.setattr("starlette.responses.iterate_in_threadpool", each_here)
        event.listen(Pool, "connect", connected)
        try:
            yield
        finally:
            event.remove(Pool, "connect", connected)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a loop of its own, and leave nothing of it behind."""
    loop = Loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
