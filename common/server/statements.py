"""SQL statements for many rows at a time that cost little more than the database's own work.

SQLAlchemy compiles a statement object only once, so keep frequent statements as constants.
`is_one_of` passes a list of texts as one parameter, whereas SQLAlchemy's ``in_`` makes each text a
parameter. `execute_rows` hands tuples to the driver, whereas SQLAlchemy's own ``executemany``
visits every value. tests/shuffler/test_plans.py checks that no request reads a whole table.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import NullType, TypeEngine


class _Names(sa.TypeDecorator[Sequence[str]]):
    """A list of texts as one parameter: an array on PostgreSQL, a JSON array on SQLite."""

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(sa.ARRAY(sa.String()) if _has_arrays(dialect) else sa.Text())

    def process_bind_param(self, value: Sequence[str] | None, dialect: sa.Dialect) -> object:
        return value if value is None or _has_arrays(dialect) else json.dumps(value)


class _IsOneOf(FunctionElement[Any]):
    # Not Boolean: for SQLite, SQLAlchemy would append ``= 1``, and no index serves that condition.
    type = NullType()
    inherit_cache = True


@compiles(_IsOneOf)
def _compile_is_one_of(element: _IsOneOf, compiler: SQLCompiler, **options: object) -> str:
    column, names = (compiler.process(part, **options) for part in element.clauses)
    if _has_arrays(compiler.dialect):
        return f"{column} = ANY({names})"
    return f"{column} IN (SELECT value FROM json_each({names}))"  # noqa: S608 -- holds no value


def is_one_of(column: sa.ColumnElement[str], parameter: str) -> sa.ColumnElement[bool]:
    """Returns the condition that a column's value is in the list that ``parameter`` will hold."""
    return _IsOneOf(column, sa.bindparam(parameter, type_=_Names()))


def unindexed(column: sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    """Returns the column's text in a form for which the database uses no index.

    Use this beside an `is_one_of` on another column, whose index leads to fewer rows. SQLite has no
    statistics here, so it could choose this column's index and read all rows of a batch.
    """
    return column.concat(sa.literal_column("''"))


def execute_rows(
    connection: sa.Connection,
    statement: sa.Insert | sa.Update | sa.Delete,
    names: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
) -> None:
    """Executes a constant statement for each row.

    A row has one value for each of the parameters ``names``. Values go to the driver as they are,
    so they need types that the driver accepts. In an insert, SQLAlchemy's own defaults do not
    apply.
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
    statement: sa.Insert | sa.Update | sa.Delete, names: tuple[str, ...], dialect: sa.Dialect
) -> tuple[str, tuple[int, ...] | None]:
    """Returns the statement's text and, if the driver takes values by position, their order."""
    keys = list(names) if isinstance(statement, sa.Insert) else None
    compiled = statement.compile(dialect=dialect, column_keys=keys)
    assert isinstance(compiled, SQLCompiler)  # noqa: S101 -- narrows what compile returns
    if missing := set(compiled.params) - set(names):
        raise ValueError(f"the statement has parameters without a name: {sorted(missing)}")
    if compiled.positiontup is None:
        return str(compiled), None
    return str(compiled), tuple(map(names.index, compiled.positiontup))


def _has_arrays(dialect: sa.Dialect) -> bool:
    return dialect.name == "postgresql"
