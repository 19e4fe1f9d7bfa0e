"""One thread that writes: it groups what waits into one transaction and answers after the sync.

A sync costs the same for one write as for fifty, so under load the groups grow and the cost of
durability is shared. A job that fails undoes itself and nobody else: what its group has done is
rolled back, and all of it done again with a savepoint around each job. Hardly a job fails, and
savepoints around all of them from the start cost two statements each. So a job may run twice, of
which one counts. No answer leaves before the commit has returned.

The store as the event loop uses it: reads in threads, writes through the committer.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from riffle.common.process.tracing import in_span
from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import is_shared, writer
from riffle.shuffler.store.schema import not_usable, open_store

T = TypeVar("T")

MAX_GROUP = 64


@dataclass(slots=True)
class Job(Generic[T]):
    """A write that waits, and where its answer goes."""

    write: Callable[[Connection], T]
    future: Future[T] = field(default_factory=Future)
    _answer: Callable[[], None] | None = None

    def run(self, connection: Connection) -> None:
        """Do the work inside the group's transaction; the answer waits for `answer`."""
        result = self.write(connection)
        self._answer = lambda: self.future.set_result(result)

    def run_apart(self, connection: Connection) -> None:
        """As `run`, in a savepoint: a failure is this job's answer and nobody else's."""
        try:
            with connection.begin_nested():
                self.run(connection)
        except Exception as error:
            if _ends_all(error):
                raise
            failure = error
            self._answer = lambda: self.future.set_exception(failure)

    def answer(self) -> None:
        """Hand over the result: only after the group's commit.

        What answers is let go: it and this job hold each other, and with them megabytes of an
        upload, until a full garbage collection would find them.
        """
        answer, self._answer = self._answer, None
        if answer is not None:
            answer()


def _ends_all(error: Exception) -> bool:
    """Whether the transaction itself is in doubt: disk full, lock not granted, connection lost."""
    return isinstance(error, OperationalError) or (
        isinstance(error, DBAPIError) and error.connection_invalidated
    )


class Committer:
    """The writing thread. ``submit`` from any thread; ``close`` finishes what waits."""

    def __init__(self, engine: Engine, *, max_waiting: int = 1024) -> None:
        self._engine = writer(engine)
        self._jobs: queue.Queue[Job[object] | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._loop, name="committer", daemon=True)
        self._thread.start()

    def submit(self, write: Callable[[Connection], T]) -> Future[T]:
        """Queue a write; its future is answered once it is durable.

        Raises:
            LocalError: ``too-many-requests``, when too much waits already.
        """
        job: Job[T] = Job(write)
        try:
            self._jobs.put_nowait(job)  # type: ignore[arg-type]
        except queue.Full:
            raise LocalError(
                "too-many-requests", "too many writes are waiting", retry_after=1
            ) from None
        return job.future

    @property
    def waiting(self) -> int:
        """Writes that wait for their turn."""
        return self._jobs.qsize()

    def close(self) -> None:
        """Write what waits, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _loop(self) -> None:
        open_for_more = True
        while open_for_more:
            group, open_for_more = self._next_group()
            if group:
                self._commit(group)
            del group  # nothing of it is kept while no other comes

    def _next_group(self) -> tuple[list[Job[object]], bool]:
        """Wait for one job and take what else is there; False when told to end."""
        group: list[Job[object]] = []
        job = self._jobs.get()
        while job is not None:
            if job.future.set_running_or_notify_cancel():
                group.append(job)
            if len(group) >= MAX_GROUP:
                return group, True
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return group, True
        return group, False

    def _commit(self, group: Sequence[Job[object]]) -> None:
        try:
            if not self._all(group):
                self._each(group)
        except Exception as error:
            for job in group:
                job.future.set_exception(not_usable("written", error))
            return
        for job in group:
            job.answer()

    def _all(self, group: Sequence[Job[object]]) -> bool:
        """Commit all jobs; False when one failed, and then nothing is done."""
        with self._engine.begin() as connection:
            for job in group:
                try:
                    job.run(connection)
                except Exception as error:
                    if _ends_all(error):
                        raise
                    connection.rollback()
                    return False
        return True

    def _each(self, group: Sequence[Job[object]]) -> None:
        """Commit the jobs that succeed."""
        with self._engine.begin() as connection:
            for job in group:
                job.run_apart(connection)


class Access:
    """An open store. ``writes`` changes when a write begins and when it ends.

    ``shared``: other processes may write to it.
    """

    def __init__(self, url: str) -> None:
        self.engine = open_store(url)
        self.committer = Committer(self.engine)
        self.shared = is_shared(self.engine)
        self.writes = 0

    def close(self) -> None:
        """Finish waiting writes and let go of the store."""
        self.committer.close()
        self.engine.dispose()

    async def read(self, query: Callable[[Connection], T]) -> T:
        """What a query finds.

        Raises:
            LocalError: ``unavailable``, when the store cannot be read.
        """

        def run() -> T:
            with self.engine.connect() as connection:
                return query(connection)

        try:
            return await asyncio.to_thread(run)
        except SQLAlchemyError as error:
            raise not_usable("read", error) from error

    @in_span("store")
    async def write(self, write: Callable[[Connection], T]) -> T:
        """What a write answers, once it is durable.

        Raises:
            LocalError: ``unavailable``, ``too-many-requests``; see `Committer.submit`.
        """
        self.writes += 1
        try:
            return await asyncio.wrap_future(self.committer.submit(write))
        finally:
            self.writes += 1
