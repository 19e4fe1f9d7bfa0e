"""Revisions and tables agree; stores are migrated at opening, once, and refused when newer."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import revision, writer
from riffle.coordinator.store import schema as coordinator_schema
from riffle.shuffler.store import schema as shuffler_schema

SCHEMAS: dict[str, Any] = {"shuffler": shuffler_schema, "coordinator": coordinator_schema}


@pytest.fixture(params=["shuffler", "coordinator"])
def schema(request: pytest.FixtureRequest) -> Any:
    return SCHEMAS[request.param]


def test_the_revisions_end_in_the_tables_of_the_program(url: str, schema: Any) -> None:
    engine = schema.open_store(url)
    with engine.connect() as connection:
        assert revision(connection) == schema.SCHEMA.head
        result = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(result, schema.metadata) == []
    engine.dispose()


def test_the_program_works_with_the_newest_revision(schema: Any) -> None:
    assert ScriptDirectory(str(schema.SCHEMA.folder)).get_heads() == [schema.SCHEMA.head]


def test_a_newer_store_is_refused_and_left_alone(url: str, schema: Any) -> None:
    engine = schema.open_store(url)
    with writer(engine).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'much_later'"))
    with pytest.raises(LocalError, match="schema version much_later, this program knows") as caught:
        schema.open_store(url)
    assert caught.value.slug == "unavailable"
    with engine.connect() as connection:
        assert revision(connection) == "much_later"
    engine.dispose()


def test_the_store_of_another_service_is_refused(url: str) -> None:
    shuffler_schema.open_store(url).dispose()
    with pytest.raises(LocalError, match="schema version shuffler_3, this program knows coord"):
        coordinator_schema.open_store(url)


def test_replicas_that_start_together_migrate_once(url: str, schema: Any) -> None:
    with ThreadPoolExecutor(4) as threads:
        engines = list(threads.map(schema.open_store, [url] * 4))
    for engine in engines:
        with engine.connect() as connection:
            assert revision(connection) == schema.SCHEMA.head
        engine.dispose()


def test_a_migration_that_fails_leaves_nothing(url: str, schema: Any) -> None:
    """Its tables are there without a revision: whose they are nobody knows."""
    engine = schema.open_store(url)
    with writer(engine).begin() as connection:
        connection.execute(text("DROP TABLE alembic_version"))
    with pytest.raises(LocalError, match="cannot be used"):
        schema.open_store(url)
    with engine.connect() as connection:
        assert revision(connection) is None
    engine.dispose()
