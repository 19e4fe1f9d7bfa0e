"""The personal ledger: what each person has spent over all shufflers and epochs.

A node charges each report to this ledger before the episode begins. If the node dies after that,
the charge stays, because a report may have left. The charge is given back only if no upload began.

All nodes of an owner share one SQLite file. One transaction checks and charges, so racing nodes
never exceed the limit together. Somebody may replace the file by an older copy while nodes run.
Every transaction therefore opens the file afresh. It compares the file's number of changes with the
head (`common.process.heads`). If the file has the smaller number, the transaction is refused. The
file is not encrypted.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from riffle.common.accounting import BatchEvent, repeated_user_guarantee
from riffle.common.mechanism.parameters import Guarantee, Padding
from riffle.common.process.heads import HeadFolder
from riffle.common.protocol.descriptor import BatchDescriptor, Document, Epoch, NoiseDocument
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.verification import required_event

NAME = "ledger"
BUSY_SECONDS = 10.0
SCHEMA_VERSION = 1
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS head (number INTEGER NOT NULL);
INSERT INTO head SELECT 0 WHERE NOT EXISTS (SELECT * FROM head);
CREATE TABLE IF NOT EXISTS batches (id INTEGER PRIMARY KEY, charge TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS charges (
    user TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    batch INTEGER NOT NULL REFERENCES batches (id),
    at INTEGER NOT NULL,
    PRIMARY KEY (user, batch_id)
) WITHOUT ROWID;
PRAGMA user_version = 1;
COMMIT;
"""
_CHARGE = "INSERT INTO charges SELECT ?, ?, id, ? FROM batches WHERE charge = ?"
_JOINED = "FROM charges JOIN batches ON id = batch"


class EventDocument(Document):
    """A `BatchEvent` as a document."""

    noise: NoiseDocument
    padding: Padding
    n: int
    dishonest_fraction: float
    cells: int
    counters: int
    word_bits: int | None

    @classmethod
    def of(cls, event: BatchEvent) -> "EventDocument":
        """Returns the document of an event."""
        values = {name: getattr(event, name) for name in cls.model_fields}
        return cls(**values | {"noise": NoiseDocument.of(event.noise)})

    def event(self) -> BatchEvent:
        """Returns the `BatchEvent` that this document describes."""
        return BatchEvent(**dict(self) | {"noise": self.noise.noise()})


class Charge(Document):
    """The privacy that one report to a batch spends.

    ``coordinator`` is the coordinator's public key, hex. ``event`` is the accountant's input, or
    None if the batch is seeded and protects nobody.
    """

    batch_id: str = ""
    run_id: str = ""
    shuffler_id: str = ""
    coordinator: str = ""
    trust: str = ""
    epoch: Epoch | None = None
    event: EventDocument | None = None

    @classmethod
    def of(cls, d: BatchDescriptor, coordinator: bytes, required: Guarantee) -> "Charge":
        """Returns the charge for a report to the batch of a checked descriptor."""
        event = None if d.test_seed is not None else EventDocument.of(required_event(d, required))
        names = ("batch_id", "run_id", "shuffler_id", "trust", "epoch")
        fields = {name: getattr(d, name) for name in names}
        return cls(coordinator=coordinator.hex(), event=event, **fields)

    @property
    def start(self) -> int:
        """The start of the batch's epoch; 0 if users report once in a lifetime."""
        return self.epoch.start if self.epoch else 0


UNCHARGED = Charge()
"""The charge of every report if the owner has no ledger (and so refuses batches with epochs)."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest epsilon that a person may spend over all batches, at this beta."""

    epsilon: float
    beta: float

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} at beta {self.beta:g}"

    def spent(self, charges: Sequence[Charge]) -> float:
        """Returns the composed epsilon of these charges at the limit's beta."""
        events = [charge.event.event() for charge in charges if charge.event]
        if len(events) < len(charges):
            return float("inf")
        return repeated_user_guarantee(events, self.beta).epsilon


@dataclass(frozen=True, slots=True)
class PersonalLedger:
    """The ledger in a file, for several threads and processes.

    The methods block. If the file is unusable, they raise LocalError ``unavailable``.
    """

    file: Path
    head: HeadFolder
    limit: Limit
    clock: Callable[[], float] = time.time

    def check(self, key: bytes | None = None) -> None:
        """Makes the file if needed and binds it to ``key``; raises LocalError if it is unusable."""
        with self._writing() as database:
            bind_key(database, self.file, key)

    def affordable(self, users: Sequence[str], charge: Charge) -> list[str]:
        """Returns the users who could be charged now; changes nothing."""
        with self._transaction() as database:
            return [user for user in users if self._fits(database, user, charge)]

    def charge(self, users: Sequence[str], charge: Charge) -> list[str]:
        """Charges users durably for a report to a batch; returns those who were charged.

        Only these users may be asked for an episode.
        """
        charged, document, now = [], charge.model_dump_json(), int(self.clock())
        with self._writing() as database:
            database.execute("INSERT OR IGNORE INTO batches (charge) VALUES (?)", (document,))
            for user in users:
                if self._fits(database, user, charge):
                    database.execute(_CHARGE, (user, charge.batch_id, now, document))
                    charged.append(user)
        return charged

    def give_back(self, users: Sequence[str], charge: Charge) -> None:
        """Deletes these charges. Call it only if nothing of the reports has left the device."""
        rows = [(user, charge.batch_id) for user in users]
        with self._writing() as database:
            database.executemany("DELETE FROM charges WHERE user = ? AND batch_id = ?", rows)

    def histories(self) -> dict[str, list[tuple[int, Charge]]]:
        """Returns each person's charges with their times, oldest first."""
        found: dict[str, list[tuple[int, Charge]]] = {}
        with self._transaction() as database:
            rows = database.execute(f"SELECT user, at, charge {_JOINED} ORDER BY user, at, id")
            for person, at, charge in rows:
                found.setdefault(person, []).append((at, Charge.model_validate_json(charge)))
        return found

    def _fits(self, database: sqlite3.Connection, user: str, charge: Charge) -> bool:
        rows = database.execute(f"SELECT charge {_JOINED} WHERE user = ?", (user,))
        before = [Charge.model_validate_json(row[0]) for row in rows]
        if any(each.batch_id == charge.batch_id for each in before):
            return False
        return self.limit.spent([*before, charge]) <= self.limit.epsilon

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Opens a transaction, and adds 1 to the number of changes in the file and in the head."""
        with self._transaction("BEGIN IMMEDIATE") as database:
            yield database
            raise_number = "UPDATE head SET number = number + 1 RETURNING number"
            (number,) = database.execute(raise_number).fetchone()
        self.head.write(number)

    @contextmanager
    def _transaction(self, begin: str = "BEGIN") -> Iterator[sqlite3.Connection]:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600))
            opened = self.file.stat()
            opening = sqlite3.connect(self.file, BUSY_SECONDS, isolation_level=None)
            with closing(opening) as database:
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
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version == 0:
            database.executescript(_SCHEMA)
        elif version != SCHEMA_VERSION:
            detail = f"{self.file} has version {version}, this program has {SCHEMA_VERSION}"
            raise LocalError("unavailable", detail)

    def _check_head(self, database: sqlite3.Connection) -> None:
        (number,) = database.execute("SELECT number FROM head").fetchone()
        if number < (head := self.head.written()):
            raise LocalError(
                "unavailable",
                f"the ledger {self.file} is empty or an older copy: its number is {number}, its "
                f"head is {head}. It has forgotten what people have spent since. Restore the "
                f"newest copy. To go on without what it forgot, remove {self.head.file(head)}",
            )


def bind_key(database: sqlite3.Connection, file: Path, key: bytes | None) -> None:
    """Binds a file to ``key``, the key of `users.opaque_id`. Does nothing if ``key`` is None.

    With another key, everybody would be a new user. The file stores 31 bits of a digest of the key.
    Raises LocalError ``wrong-state`` if the file is bound to another key.
    """
    if key is None:
        return
    mark = int.from_bytes(sha256(b"riffle users key" + key).digest()[:4], "big") >> 1
    (bound,) = database.execute("PRAGMA application_id").fetchone()
    if bound not in (0, mark):
        detail = f"{file} was made with another users key; with a new key, people who took part "
        raise LocalError("wrong-state", f"{detail}would be asked again")
    database.execute(f"PRAGMA application_id = {mark}")
