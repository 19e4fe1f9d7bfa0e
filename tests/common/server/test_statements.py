"""Statements for many rows, on both engines."""

from collections.abc import Iterator

import pytest
from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    bindparam,
    create_engine,
    delete,
    insert,
    null,
    select,
    update,
)

from riffle.common.server.statements import execute_rows, is_one_of

things = Table(
    "things",
    MetaData(),
    Column("name", String(32), primary_key=True),
    Column("size", Integer),
    Column("good", Boolean, nullable=False),
    Column("data", LargeBinary),
)
INSERT = insert(things)
RESIZE = update(things).where(things.c.name == bindparam("key")).values(size=bindparam("new"))
EMPTY = update(things).where(things.c.name == bindparam("key")).values(data=null())
DELETE = delete(things).where(things.c.name == bindparam("key"))
NAMED = select(things.c.name).where(is_one_of(things.c.name, "names"), things.c.good.is_(True))
ROWS = [(b"%d" % i, i % 2 == 0, f"n{i}", i) for i in range(1_000)]


@pytest.fixture(params=["sqlite", "postgresql"])
def connection(request: pytest.FixtureRequest) -> Iterator[Connection]:
    if request.param == "sqlite":
        with create_engine("sqlite://").begin() as result:
            raw = result.connection.driver_connection
            assert raw is not None
            raw.create_function("row_checksum", -1, lambda *_: 0, deterministic=True)
            yield result
        return
    with request.getfixturevalue("cluster").database("shuffler") as url:
        engine = create_engine(url)
        with engine.begin() as result:
            yield result
        engine.dispose()


@pytest.fixture
def filled(connection: Connection) -> Connection:
    things.create(connection)
    execute_rows(connection, INSERT, ("data", "good", "name", "size"), ROWS)
    return connection


def test_values_are_bound_by_name(filled: Connection) -> None:
    execute_rows(filled, RESIZE, ("new", "key"), [(7, "n3"), (8, "n4")])
    execute_rows(filled, EMPTY, ("key",), [("n4",)])
    execute_rows(filled, DELETE, ("key",), [("n5",)])
    rows = filled.execute(select(things).order_by(things.c.size)).all()
    assert len(rows) == len(ROWS) - 1
    result = {row.name: (row.size, row.good, row.data) for row in rows}
    assert result["n3"] == (7, False, b"3")
    assert result["n4"] == (8, True, None)
    assert result["n6"] == (6, True, b"6")
    assert "n5" not in result


def test_no_rows_execute_no_statement(filled: Connection) -> None:
    execute_rows(filled, DELETE, ("key",), [])
    assert len(filled.execute(select(things)).all()) == len(ROWS)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["n1"], []),
        (["n2", "n3", "n2", "nowhere", 'quo"te', "'; drop"], ["n2"]),
        ([f"n{i}" for i in range(2_000)], sorted(f"n{i}" for i in range(0, 1_000, 2))),
    ],
)
def test_rows_are_selected_by_a_list_of_names(
    filled: Connection, names: list[str], expected: list[str]
) -> None:
    assert sorted(filled.scalars(NAMED, {"names": names})) == expected


def test_a_parameter_without_a_value_is_refused(filled: Connection) -> None:
    fixed = update(things).where(things.c.name == bindparam("key")).values(size=3)
    with pytest.raises(ValueError, match="size"):
        execute_rows(filled, fixed, ("key",), [("n1",)])
