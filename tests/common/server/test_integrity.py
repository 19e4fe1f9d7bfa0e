"""Random damage in the files of both stores is found when they are opened, or by a report's tag."""

import os
import random
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    Boolean,
    Column,
    Engine,
    Float,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    create_engine,
    insert,
    inspect,
    select,
)

from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import AUTHENTICATED, Head, _check_integrity, writer
from riffle.coordinator.store import schema as coordinator_schema
from riffle.shuffler.store import schema as shuffler_schema
from riffle.shuffler.store.report_rows import stored_reports
from riffle.shuffler.store.vault import BatchSecret, ReportCipher

SCHEMAS: dict[str, Any] = {"shuffler": shuffler_schema, "coordinator": coordinator_schema}
CIPHER = ReportCipher("a batch", BatchSecret.generate())
FLIPS = int(os.environ.get("RIFFLE_FLIPS", "40"))
ROWS = 60
SUMS = shuffler_schema.sums.c
OF_BATCH = select(SUMS.sealed).where(SUMS.batch_id == bindparam("batch"))
Contents = list[tuple[object, ...]] | None


def fill(engine: Engine, metadata: MetaData, rows: int = ROWS) -> None:
    """Writes rows into every table. Rows of the same number refer to each other."""
    generator = random.Random(1)
    with writer(engine).begin() as connection:
        for table in metadata.sorted_tables:
            values = [
                {column.key: value(column, number, generator) for column in table.c}
                for number in range(rows)
            ]
            connection.execute(insert(table), values)


def value(column: Column[Any], number: int, generator: random.Random) -> object:
    kind = column.type
    if column.info.get(AUTHENTICATED):
        return CIPHER.encrypt([number], generator.randbytes(300))
    if isinstance(kind, LargeBinary):
        return generator.randbytes(kind.length or 300)
    if isinstance(kind, Text):
        return f"text {number} " * 10
    if isinstance(kind, String):
        return f"{number:0{kind.length}x}"
    if isinstance(kind, Boolean):
        return number % 2 == 0
    return number + 0.25 if isinstance(kind, Float) else number


@dataclass(frozen=True)
class Tally:
    changed: int
    found: int
    missed: Sequence[str]


def contents(file: Path) -> Contents:
    """All rows, in the order of the table; None if they cannot be read."""
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = sorted(name for (name,) in names)
            return [
                (table, *row)
                for table in tables
                for row in connection.execute(f'SELECT * FROM "{table}" NOT INDEXED')  # noqa: S608
            ]
    except (sqlite3.Error, UnicodeDecodeError):
        return None


def is_found(name: str, file: Path) -> bool:
    """Whether the store is refused, or its reports are when a batch is handed over."""
    schema = SCHEMAS[name]
    try:
        engine = schema.open_store(f"sqlite:///{file}", Head(file.parent, name, schema.meta))
        try:
            with engine.connect() as connection:
                for number in range(ROWS) if schema is shuffler_schema else ():
                    for _, stored in stored_reports(connection, f"{number:032x}"):
                        CIPHER.decrypt([number], stored)
                    for stored in connection.scalars(OF_BATCH, {"batch": f"{number:032x}"}):
                        CIPHER.decrypt([number], bytes(stored))
        finally:
            engine.dispose()
    except LocalError as error:
        assert "\n" not in error.detail
        return True
    return False


def flip(data: bytes, generator: random.Random) -> tuple[bytes, str]:
    size = generator.randint(1, 64)
    start = generator.randrange(len(data) - size)
    noise = bytes(generator.randint(1, 255) for _ in range(size))
    changed = bytes(a ^ b for a, b in zip(data[start : start + size], noise, strict=True))
    return data[:start] + changed + data[start + size :], f"{size} bytes at {start}"


def tally(name: str, folder: Path, flips: int) -> Tally:
    schema, whole, damaged = SCHEMAS[name], folder / "whole.sqlite", folder / "damaged.sqlite"
    engine = schema.open_store(f"sqlite:///{whole}")
    fill(engine, schema.metadata)
    engine.dispose()
    generator, data, before = random.Random(7), whole.read_bytes(), contents(whole)
    changed, missed = 0, []
    for _ in range(flips):
        now, what = flip(data, generator)
        damaged.write_bytes(now)
        if contents(damaged) != before:
            changed += 1
            if not is_found(name, damaged):
                missed.append(what)
        for left in folder.glob("damaged*"):
            left.unlink()
    shutil.rmtree(folder)
    return Tally(changed, changed - len(missed), missed)


@pytest.mark.parametrize("name", SCHEMAS)
def test_damage_that_changes_content_is_found(name: str, tmp_path: Path) -> None:
    result = tally(name, tmp_path, FLIPS)
    assert result.changed > FLIPS / 4
    assert result.missed == []


@pytest.mark.parametrize("name", SCHEMAS)
def test_damage_in_any_column_of_any_table_is_found(name: str, tmp_path: Path) -> None:
    """The row keeps its former checksum, as in a damaged page."""
    schema, file = SCHEMAS[name], tmp_path / "a.sqlite"
    engine = schema.open_store(f"sqlite:///{file}")
    fill(engine, schema.metadata, rows=1)
    for column in (column for table in schema.metadata.sorted_tables for column in table.c):
        before = replace_value(file, column, None)
        changed = 77 if isinstance(before, int | float) else before + before[:1]
        replace_value(file, column, changed)
        assert damage(schema, engine) == (not column.info.get(AUTHENTICATED)), column
        replace_value(file, column, before)
        assert not damage(schema, engine)
    engine.dispose()


def replace_value(file: Path, column: Column[Any], value: object) -> Any:
    """Replaces a value of a table's first row unless it is None; returns the former value."""
    name, table = column.name, column.table.name
    with closing(sqlite3.connect(file)) as store, store:
        query = f'SELECT "{name}", checksum FROM "{table}" ORDER BY rowid'  # noqa: S608
        before, checksum = store.execute(query).fetchone()
        store.create_function("row_checksum", -1, lambda *_: checksum, deterministic=True)
        if value is not None:
            first = f'(SELECT min(rowid) FROM "{table}")'  # noqa: S608
            change = f'UPDATE "{table}" SET "{name}" = ? WHERE rowid = {first}'  # noqa: S608
            store.execute(change, (value,))
    return before


def damage(schema: Any, engine: Engine) -> bool:
    """Returns whether the check at a start finds anything."""
    with engine.connect() as connection:
        try:
            _check_integrity(connection, schema.metadata)
        except LocalError:
            return True
    return False


def test_tables_of_other_programs_get_no_checksum() -> None:
    metadata = MetaData()
    Table("theirs", metadata, Column("name", String(9)))
    engine = create_engine("sqlite://")
    metadata.create_all(engine)
    assert [column["name"] for column in inspect(engine).get_columns("theirs")] == ["name"]
    engine.dispose()
