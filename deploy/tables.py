"""Rows of a run as CSV: deployments, stages and ledger, whole or growing while the run goes on.

Columns are those of the coordinator's CSV (`common.tables`).
"""

import csv
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Protocol

from riffle.common.tables import columns_of, csv_text, flat
from riffle.coordinator.views import STAGE_COLUMNS

Row = dict[str, Any]
Table = Literal["deployments", "stages", "ledger"]
TABLES: tuple[Table, ...] = ("deployments", "stages", "ledger")
OTHERWISE: dict[Table, tuple[str, ...]] = {"stages": STAGE_COLUMNS}
"""Columns of a table that may be empty at a run's end, as the stages of one by hand are."""


class Source(Protocol):
    """Where the rows come from: the operator's client."""

    def deployments(self, run_id: str, /) -> list[Row]:
        """All deployments."""

    def stages(self, run_id: str, /) -> list[Row]:
        """Finished stages."""

    def ledger(self, run_id: str, /) -> Row:
        """What was spent, under ``entries``."""


def rows_of(source: Source, run_id: str, table: Table) -> list[Row]:
    """The rows of a table, in order."""
    found = (
        source.ledger(run_id)["entries"] if table == "ledger" else _listed(source, run_id, table)
    )
    return [flat(row) for row in found]


def replace_csv(file: Path, rows: Sequence[Row], otherwise: Sequence[str] = ()) -> None:
    """Write a whole file aside and rename it, so that nobody reads half of it.

    Without rows it has the columns of ``otherwise``.
    """
    aside = file.with_name(file.name + ".new")
    aside.write_text(csv_text(rows, otherwise))
    aside.replace(file)


def _listed(source: Source, run_id: str, table: Table) -> list[Row]:
    return source.stages(run_id) if table == "stages" else source.deployments(run_id)


class Growing:
    """The tables of a run as files to which rows are added once they are settled.

    What comes later, as the acknowledgement, is in the files that are written at the end.
    """

    def __init__(self, folder: Path, source: Source, run_id: str) -> None:
        self._folder, self._source, self._run_id = folder, source, run_id
        self._written = dict.fromkeys(TABLES, 0)
        self._columns: dict[Table, list[str]] = {}

    def grow(self) -> None:
        """Add what is new."""
        for table in TABLES:
            rows = rows_of(self._source, self._run_id, table)
            done = list(takewhile(lambda row: row.get("settled_at", 0) is not None, rows))
            self._append(table, done[self._written[table] :])
            self._written[table] = len(done)

    def _append(self, table: Table, rows: list[Row]) -> None:
        if not rows:
            return
        first = table not in self._columns
        columns = self._columns.setdefault(table, columns_of(rows))
        with (self._folder / f"{table}.csv").open("w" if first else "a") as stream:
            writer = csv.DictWriter(stream, columns, extrasaction="ignore", lineterminator="\n")
            if first:
                writer.writeheader()
            writer.writerows(rows)
