"""The ledger of what people spend over their lives, at their own side: their node's owner.

Wherever a person may report more than once (at several shufflers, or once an epoch), nobody but her
own side can add up what her reports reveal together. So the node's owner sets a lifetime limit
(epsilon, beta), and a node charges each report to this ledger before it runs the episode:

- A charge is refused if the exact composition of all the person's batches would pass the limit
  (`common.accounting.repeated_user_guarantee`, at the limit's beta and the owner's dishonest
  fraction). Check and charge are one transaction, so nodes that race never pass the limit together.
- A charge is on disk before the episode begins. If the node dies later, or the batch is abandoned,
  the charge stays, because a report may have left. It is given back only if the report was dropped
  before its upload began.
- A person is charged once a batch. A second charge for one batch is refused.

All nodes of an owner, also those of different shufflers, share one SQLite file. Every transaction
opens it afresh and checks its number against its head (`common.process.heads`), which is outside
it. So an older copy or an emptied file is refused, and nobody is asked, even if the file is
replaced while nodes run. The file is not encrypted. It shows the owner's people, by the ids that
the shufflers know, and their batches.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from riffle.common.accounting import BatchEvent, repeated_user_guarantee
from riffle.common.process.heads import HeadFolder
from riffle.common.protocol.descriptor import BatchDescriptor, Epoch
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.verification import EventDocument

NAME = "ledger"
BUSY_SECONDS = 10.0
SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE head (number INTEGER NOT NULL);
INSERT INTO head VALUES (0);
CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    batch_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    shuffler_id TEXT NOT NULL,
    coordinator TEXT NOT NULL,
    trust TEXT NOT NULL,
    epoch_start INTEGER,
    epoch_end INTEGER,
    event TEXT NOT NULL,
    UNIQUE (batch_id, event)
);
CREATE TABLE charges (
    user TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    batch INTEGER NOT NULL REFERENCES batches (id),
    at INTEGER NOT NULL,
    PRIMARY KEY (user, batch_id)
) WITHOUT ROWID;
PRAGMA user_version = 1;
"""
_ADD_BATCH = """
INSERT OR IGNORE INTO batches
    (batch_id, run_id, shuffler_id, coordinator, trust, epoch_start, epoch_end, event)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
_CHARGE = """
INSERT INTO charges SELECT ?, batch_id, id, ? FROM batches WHERE batch_id = ? AND event = ?
"""
_HISTORY = """
SELECT user, at, batches.* FROM charges JOIN batches ON batches.id = charges.batch
    ORDER BY user, at, id
"""
_OF_USER = """
SELECT batches.* FROM charges JOIN batches ON batches.id = charges.batch WHERE user = ?
"""


@dataclass(frozen=True, slots=True)
class Charge:
    """What one report to a batch spends.

    ``coordinator`` is its public key, hex. ``event`` is what the accountant must know, at the
    owner's dishonest fraction; None if the noise is seeded, so that the report spends everything.
    """

    batch_id: str
    run_id: str
    shuffler_id: str
    coordinator: str
    trust: str
    epoch: Epoch | None
    event: BatchEvent | None

    @classmethod
    def of(cls, descriptor: BatchDescriptor, coordinator: bytes, event: BatchEvent) -> "Charge":
        """Returns the charge for a report to the batch of a checked descriptor."""
        d = descriptor
        return cls(
            *(d.batch_id, d.run_id, d.shuffler_id, coordinator.hex(), d.trust, d.epoch),
            event=None if d.test_seed is not None else event,
        )

    @property
    def start(self) -> int:
        """The start of the batch's epoch; 0 if users report once in a lifetime."""
        return self.epoch.start if self.epoch else 0

    def row(self) -> tuple[object, ...]:
        """Returns the batch's row without its id."""
        start, end = (self.epoch.start, self.epoch.end) if self.epoch else (None, None)
        event = "" if self.event is None else EventDocument.of(self.event).model_dump_json()
        ids = (self.batch_id, self.run_id, self.shuffler_id, self.coordinator, self.trust)
        return (*ids, start, end, event)

    @classmethod
    def from_row(cls, row: Sequence[object]) -> "Charge":
        """Returns the charge of a batch's row without its id."""
        batch_id, run_id, shuffler_id, coordinator, trust, start, end, event = row
        return cls(
            batch_id=str(batch_id),
            run_id=str(run_id),
            shuffler_id=str(shuffler_id),
            coordinator=str(coordinator),
            trust=str(trust),
            epoch=None if start is None else Epoch(int(str(start)), int(str(end))),
            event=EventDocument.model_validate_json(str(event)).event() if event else None,
        )


UNCHARGED = Charge("", "", "", "", "", None, None)
"""Stands for any batch without epochs, where there is no ledger."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a person may spend over all batches: epsilon at beta."""

    epsilon: float
    beta: float

    def spent(self, charges: Sequence[Charge]) -> float:
        """Returns the composed epsilon of these charges at the limit's beta."""
        events = [charge.event for charge in charges if charge.event is not None]
        if len(events) < len(charges):
            return float("inf")
        return repeated_user_guarantee(events, self.beta).epsilon


@dataclass(frozen=True, slots=True)
class PersonalLedger:
    """The ledger in a file. Methods block, and raise LocalError ``unavailable`` if it is unusable.

    Several threads and processes may use it.
    """

    file: Path
    head: HeadFolder
    limit: Limit
    clock: Callable[[], float] = time.time

    def check(self) -> None:
        """Makes the file if it is missing, and checks it; raises LocalError if it is unusable."""
        self.head.write(self._advance(lambda _: None))

    def affordable(self, users: Sequence[str], charge: Charge) -> list[str]:
        """Returns the users who could be charged now; changes nothing."""
        with self._transaction() as database:
            return [user for user in users if self._fits(database, user, charge)]

    def charge(self, users: Sequence[str], charge: Charge) -> list[str]:
        """Charges users durably for a report to a batch; returns those who were charged.

        Nobody who is not among them may be asked.
        """
        charged: list[str] = []

        def write(database: sqlite3.Connection) -> None:
            row, now = charge.row(), int(self.clock())
            database.execute(_ADD_BATCH, row)
            for user in users:
                if self._fits(database, user, charge):
                    database.execute(_CHARGE, (user, now, charge.batch_id, row[-1]))
                    charged.append(user)

        self.head.write(self._advance(write))
        return charged

    def give_back(self, users: Sequence[str], charge: Charge) -> None:
        """Deletes charges of reports of which nothing has left the device."""
        rows = [(user, charge.batch_id) for user in users]
        delete = "DELETE FROM charges WHERE user = ? AND batch_id = ?"
        self.head.write(self._advance(lambda database: database.executemany(delete, rows)))

    def histories(self) -> dict[str, list[tuple[int, Charge]]]:
        """Returns each person's charges with their times, oldest first."""
        found: dict[str, list[tuple[int, Charge]]] = {}
        with self._transaction() as database:
            for person, at, _, *row in database.execute(_HISTORY):
                found.setdefault(person, []).append((at, Charge.from_row(row)))
        return found

    def _fits(self, database: sqlite3.Connection, user: str, charge: Charge) -> bool:
        before = [Charge.from_row(row[1:]) for row in database.execute(_OF_USER, (user,))]
        if any(each.batch_id == charge.batch_id for each in before):
            return False
        return self.limit.spent([*before, charge]) <= self.limit.epsilon

    def _advance(self, write: Callable[[sqlite3.Connection], object]) -> int:
        """Writes in one transaction; returns the new number, which the caller must write."""
        with self._transaction("BEGIN IMMEDIATE") as database:
            write(database)
            (number,) = database.execute(
                "UPDATE head SET number = number + 1 RETURNING number"
            ).fetchone()
        return int(number)

    @contextmanager
    def _transaction(self, begin: str = "BEGIN") -> Iterator[sqlite3.Connection]:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600))
            opened = self.file.stat()
            with closing(
                sqlite3.connect(self.file, BUSY_SECONDS, isolation_level=None)
            ) as database:
                database.execute("PRAGMA synchronous = EXTRA")
                self._prepare(database)
                database.execute(begin)
                self._check_head(database)
                yield database
                database.execute("COMMIT")
            if not os.path.samestat(opened, self.file.stat()):
                raise LocalError("unavailable", f"{self.file} was replaced while it was written")
        except (OSError, sqlite3.Error) as error:
            detail = f"cannot use the ledger {self.file}: {error}"
            raise LocalError("unavailable", detail) from error

    def _prepare(self, database: sqlite3.Connection) -> None:
        """Makes the tables in an empty file; several processes may do so at once."""
        if database.execute("PRAGMA user_version").fetchone()[0] == 0:
            database.execute("BEGIN IMMEDIATE")
            if database.execute("PRAGMA user_version").fetchone()[0] == 0:
                for statement in _SCHEMA.split(";"):
                    database.execute(statement)
            database.execute("COMMIT")
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            detail = f"{self.file} has version {version}, this program has {SCHEMA_VERSION}"
            raise LocalError("unavailable", detail)

    def _check_head(self, database: sqlite3.Connection) -> None:
        (number,), head = (
            database.execute("SELECT number FROM head").fetchone(),
            self.head.written(),
        )
        if number < head:
            raise LocalError(
                "unavailable",
                f"the ledger {self.file} is empty or an older copy: its number is {number}, its "
                f"head is {head}. It has forgotten what people have spent since. Restore the "
                f"newest copy. To go on without what it forgot, remove {self.head.file(head)}",
            )
