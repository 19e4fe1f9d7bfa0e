"""News between replicas of a service: PostgreSQL's LISTEN and NOTIFY, delivered by the commit.

News only wakes whoever waits; what is true is read from the store. So lost news costs a moment:
who waits looks again by himself after a while. On SQLite there is one process and no news.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from sqlalchemy import Connection, Engine, func, select

CHANNEL = "riffle"
AGAIN_SECONDS = 1.0


def announce(connection: Connection, what: str) -> None:
    """Tell all replicas when this transaction commits, and not if it does not."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_notify(CHANNEL, what)))


async def listen(engine: Engine, heard: Callable[[str], None]) -> None:
    """Call ``heard`` with all that is announced, and with "" whenever some may have been missed."""
    if engine.dialect.name != "postgresql":
        return
    from psycopg import AsyncConnection, Error  # noqa: PLC0415 -- loaded where it is needed

    _, parameters = engine.dialect.create_connect_args(engine.url)
    while True:
        with suppress(Error):
            connection = await AsyncConnection.connect(**parameters, autocommit=True)
            async with connection:
                await connection.execute(f"LISTEN {CHANNEL}")
                heard("")
                async for news in connection.notifies():
                    heard(news.payload)
        await asyncio.sleep(AGAIN_SECONDS)
