"""A run's rows as CSV: what the page offers for download, and ``riffle up`` writes. Pure.

One column a number. Of nested fields, what cannot be a column (policies, mixtures) is left out: it
is in the JSON.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

Row = Mapping[str, Any]

OPENED = {"timings", "shuffler", "rejected", "dropped", "messages", "upload_seconds"}
"""Fields that hold numbers by name."""


def csv_text(rows: Sequence[Row], otherwise: Sequence[str] = ()) -> str:
    """Rows as CSV, a column for every name that occurs; without rows, those of ``otherwise``."""
    plain = [flat(row) for row in rows]
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, columns_of(plain) or otherwise, lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return stream.getvalue()


def columns_of(rows: Sequence[Row]) -> list[str]:
    """All names that occur, in order of their first occurrence."""
    return list(dict.fromkeys(chain(*rows)))


def flat(row: Row) -> dict[str, Any]:
    """A row as plain fields; what `OPENED` names is spread, its names put before."""
    plain = {name: value for name, value in row.items() if not isinstance(value, list | dict)}
    for name, value in row.items():
        if name in OPENED and isinstance(value, dict):
            plain |= {f"{name}_{inner}": number for inner, number in flat(value).items()}
    return plain
