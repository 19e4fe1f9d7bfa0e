"""The store as the event loop uses it: reads in threads, writes through the committer."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from riffle.common.database import shared
from riffle.common.tracing import traced
from riffle.shuffler.committer import Committer
from riffle.shuffler.schema import not_usable, open_store

T = TypeVar("T")


class Access:
    """An open store. ``writes`` changes when a write begins and when it ends.

    ``shared``: other processes may write to it.
    """

    def __init__(self, url: str) -> None:
        self.engine = open_store(url)
        self.committer = Committer(self.engine)
        self.shared = shared(self.engine)
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

    @traced("store")
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
