"""Gives the event loop access to the store: reads run in threads, writes in the committer's thread.

The committer groups waiting writes into one transaction, because a sync to disk costs the same for
one write as for fifty. No answer leaves before the commit has returned.

If a job fails, the committer rolls the whole group back and runs the group again, with a savepoint
around each job. So only the failed job is undone. A job may run twice, and must therefore change
nothing but the store.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from riffle.common.process.tracing import in_span
from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import Head, is_shared, writer
from riffle.shuffler.store.schema import not_usable, open_store

P = ParamSpec("P")
T = TypeVar("T")

MAX_GROUP = 64


Answer = Callable[[], None]
"""Passes a job's outcome to the job's future. Called only after the group's commit."""


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """A waiting write and the future of its result."""

    write: Callable[[Connection], T]
    future: Future[T] = field(default_factory=Future)

    def run_apart(self, connection: Connection) -> Answer:
        """Runs the write in a savepoint, so that a failure affects this job alone."""
        try:
            with connection.begin_nested():
                result = self.write(connection)
        except Exception as error:
            if _fails_group(error):
                raise
            return partial(self.future.set_exception, error)
        return partial(self.future.set_result, result)


def _fails_group(error: Exception) -> bool:
    """Returns whether the error is of disk, lock or connection, and so fails the transaction."""
    return isinstance(error, OperationalError) or (
        isinstance(error, DBAPIError) and error.connection_invalidated
    )


class Committer:
    """The writing thread. Any thread may call ``submit``; ``close`` finishes queued writes."""

    def __init__(self, engine: Engine, *, max_waiting: int = 1024) -> None:
        self._engine = writer(engine)
        self._max_waiting = max_waiting
        self._jobs: deque[Job[Any]] = deque()
        self._thread = ThreadPoolExecutor(1, "committer")

    def submit(self, write: Callable[[Connection], T]) -> Future[T]:
        """Queues a write, or raises LocalError ``too-many-requests``.

        The returned future gets the write's result once the write is durable.
        """
        if self.waiting >= self._max_waiting:
            raise LocalError("too-many-requests", "too many writes are waiting", retry_after=1)
        job = Job(write)
        self._jobs.append(job)
        self._thread.submit(self._commit_queued)
        return job.future

    @property
    def waiting(self) -> int:
        """The number of queued writes."""
        return len(self._jobs)

    def close(self) -> None:
        """Finishes the queued writes, then ends the thread."""
        self._thread.shutdown()

    def _commit_queued(self) -> None:
        """Commits the queued jobs together, if an earlier call has not taken them all."""
        taken = [self._jobs.popleft() for _ in range(min(self.waiting, MAX_GROUP))]
        if group := [job for job in taken if job.future.set_running_or_notify_cancel()]:
            self._commit(group)

    def _commit(self, group: Sequence[Job[Any]]) -> None:
        try:
            answers = self._commit_together(group) or self._commit_apart(group)
        except Exception as error:
            answers = [
                partial(job.future.set_exception, not_usable("written", error)) for job in group
            ]
        for answer in answers:
            answer()

    def _commit_together(self, group: Sequence[Job[Any]]) -> list[Answer]:
        """Commits all jobs; if one fails, undoes them all and returns an empty list."""
        with self._engine.begin() as connection:
            try:
                return [partial(job.future.set_result, job.write(connection)) for job in group]
            except Exception as error:
                if _fails_group(error):
                    raise
                connection.rollback()
                return []

    def _commit_apart(self, group: Sequence[Job[Any]]) -> list[Answer]:
        with self._engine.begin() as connection:
            return [job.run_apart(connection) for job in group]


class Store:
    """An open store.

    ``writes`` increases whenever a write begins or ends. ``shared``: other processes may write to
    the store.
    """

    def __init__(self, url: str, head: Head) -> None:
        self.engine = open_store(url)
        self.head = head
        self.committer = Committer(self.engine)
        self.shared = is_shared(self.engine)
        self.writes = 0

    def close(self) -> None:
        """Finishes waiting writes and closes the store."""
        self.committer.close()
        self.engine.dispose()

    async def read(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns ``query(connection, ...)``. Raises LocalError ``unavailable`` if that fails."""

        def run() -> T:
            with self.engine.connect() as connection:
                return query(connection, *args, **kwargs)

        try:
            return await asyncio.to_thread(run)
        except SQLAlchemyError as error:
            raise not_usable("read", error) from error

    @in_span("store")
    async def write(
        self, write: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns a write's result once it is durable. Raises the errors of `read` and `submit`."""

        @wraps(write)
        def job(connection: Connection) -> T:
            return write(connection, *args, **kwargs)

        if self.head.trouble is not None:
            raise self.head.trouble
        self.writes += 1
        try:
            return await asyncio.wrap_future(self.committer.submit(job))
        finally:
            self.writes += 1

    async def write_for_good(
        self, write: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Does a `write` and advances the head, which reveals older copies of the store."""

        def advance_and_write(connection: Connection) -> tuple[int, T]:
            return self.head.advance(connection), write(connection, *args, **kwargs)

        number, result = await self.write(advance_and_write)
        await asyncio.to_thread(self.head.write, number)
        return result
