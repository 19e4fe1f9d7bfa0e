"""News between replicas of a service: PostgreSQL's LISTEN and NOTIFY, delivered by the commit.

News only wakes whoever waits; what is true is read from the store. So lost news costs a moment:
who waits looks again by himself after a while. On SQLite there is one process and no news.

Statements for many rows at a time, at little more than what the database itself takes.

SQLAlchemy compiles a statement once where the statement is one object: keep those that are run
often as constants. Two things it does anew every time are avoided here: `is_one_of` takes all
names as one parameter, where ``in_`` makes one of each; `execute_rows` hands tuples to the driver,
where an ``executemany`` of its own goes through every value of every row. That no statement of a
request reads a whole table or batch is tested (tests/shuffler/test_plans.py).
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Connection,
    Delete,
    Dialect,
    Engine,
    Insert,
    String,
    Text,
    TypeDecorator,
    Update,
    bindparam,
    func,
    literal_column,
    select,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import NullType, TypeEngine

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


class _Names(TypeDecorator[Sequence[str]]):
    """Texts as one parameter: an array on PostgreSQL, a JSON array elsewhere."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(ARRAY(String()) if _has_arrays(dialect) else Text())

    def process_bind_param(self, value: Sequence[str] | None, dialect: Dialect) -> object:
        return value if value is None or _has_arrays(dialect) else json.dumps(value)


class _IsOneOf(FunctionElement[Any]):
    # Not Boolean: for a database without booleans SQLAlchemy would add ``= 1``, and no index serves
    # that: every row of the table would be read.
    type = NullType()
    inherit_cache = True


@compiles(_IsOneOf)
def _compile_is_one_of(element: _IsOneOf, compiler: SQLCompiler, **options: object) -> str:
    column, names = (compiler.process(part, **options) for part in element.clauses)
    if _has_arrays(compiler.dialect):
        return f"{column} = ANY({names})"
    return f"{column} IN (SELECT value FROM json_each({names}))"  # noqa: S608 -- names no value


def is_one_of(column: ColumnElement[str], parameter: str) -> ColumnElement[bool]:
    """Whether a column is one of the texts that the statement is given as ``parameter``, a list."""
    return _IsOneOf(column, bindparam(parameter, type_=_Names()))


def unindexed(column: ColumnElement[str]) -> ColumnElement[str]:
    """The same text, for a condition that no index shall serve.

    SQLite, which keeps no statistics here, would take an index of this column for a better one than
    that of the names asked for, and read all rows of a batch.
    """
    return column.concat(literal_column("''"))


def execute_rows(
    connection: Connection,
    statement: Insert | Update | Delete,
    names: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
) -> None:
    """Execute a statement, a constant, for each row: its parameters are ``names``, in order.

    Values go to the driver as they are: for types that it takes itself only. An insert gets no
    defaults but those of the database. Rows whose values stand as the statement has them (an
    insert's as the table's columns) are handed over untouched.
    """
    if not rows:
        return
    text, order = _compiled(statement, names, connection.dialect)
    if order is None:
        connection.exec_driver_sql(text, [dict(zip(names, row, strict=True)) for row in rows])
    elif order == tuple(range(len(names))):
        connection.exec_driver_sql(text, list(rows))
    else:
        connection.exec_driver_sql(text, [tuple(row[i] for i in order) for row in rows])


@lru_cache
def _compiled(
    statement: Insert | Update | Delete, names: tuple[str, ...], dialect: Dialect
) -> tuple[str, tuple[int, ...] | None]:
    """The statement's text, and which value stands where if the driver goes by position."""
    keys = list(names) if isinstance(statement, Insert) else None
    compiled = statement.compile(dialect=dialect, column_keys=keys)
    assert isinstance(compiled, SQLCompiler)  # noqa: S101 -- narrows what compile returns
    if missing := set(compiled.params) - set(names):
        raise ValueError(f"the statement has parameters without a name: {sorted(missing)}")
    if compiled.positiontup is None:
        return str(compiled), None
    return str(compiled), tuple(map(names.index, compiled.positiontup))


def _has_arrays(dialect: Dialect) -> bool:
    return dialect.name == "postgresql"
