"""Converts rows of results to CSV, one number per column.

Nested fields that cannot be a column, such as policies, are left out; the API's JSON has them.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

Row = Mapping[str, Any]

NESTED_FIELDS = {"timings", "shuffler", "rejected", "dropped", "messages"}
"""The fields whose value is an object of named numbers."""


def csv_text(rows: Sequence[Row], default_columns: Sequence[str] = ()) -> str:
    """Returns rows as CSV, with a column for every name. Without rows, default columns are used."""
    plain = [flatten(row) for row in rows]
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, columns_of(plain) or default_columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return stream.getvalue()


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Returns all column names that occur, in the order of their first occurrence."""
    return list(dict.fromkeys(chain(*rows)))


def flatten(row: Row) -> dict[str, Any]:
    """Returns a row's plain fields, and each field inside `NESTED_FIELDS` as ``outer_inner``."""
    plain = {name: value for name, value in row.items() if not isinstance(value, list | dict)}
    for name, value in row.items():
        if name in NESTED_FIELDS and isinstance(value, dict):
            plain |= {f"{name}_{inner}": number for inner, number in flatten(value).items()}
    return plain
