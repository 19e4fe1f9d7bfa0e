"""Opening the shuffler's store; how a store is opened at all:
tests/common/server/test_database.py.
"""

from pathlib import Path

from sqlalchemy import func, select

from riffle.shuffler.store.schema import nodes, open_store, sqlite_url


def test_a_store_is_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        engine = open_store(sqlite_url(tmp_path))
        with engine.connect() as connection:
            assert connection.scalar(select(func.count()).select_from(nodes)) == 0
        engine.dispose()
