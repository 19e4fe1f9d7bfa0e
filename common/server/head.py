"""The head of a store: a number outside the database that reveals an outdated database.

A transaction that must not be forgotten raises the number in the database. After its commit, and
before anybody is answered, the number is written into a folder outside the database. So if a
database's number is below the folder's, the database was emptied or replaced by an older copy, and
has lost something that somebody relies on. Services refuse such a database.

This order makes crashes harmless: the folder never has a number that is not yet durable in the
database. A process killed between commit and write leaves a database that is ahead of the folder.
The next start accepts it and updates the folder.

The folder holds each number as the name of an empty file, and the highest number counts. So
replicas may share the folder without a lock. If a replica has a folder of its own, that folder
misses at most what others changed since this replica's last start or change.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Table, insert, select, update

from riffle.common.protocol.errors import LocalError
from riffle.common.server.at_rest import sync_directory

KEY = "head"


def read_number(connection: Connection, meta: Table, key: str) -> int | None:
    """Returns a named number of a store, or None if the store has no number of this name."""
    number: int | None = connection.scalar(select(meta.c.value).where(meta.c.key == key))
    return number


def write_number(connection: Connection, meta: Table, key: str, value: int) -> None:
    """Writes a named number of a store."""
    change = update(meta).where(meta.c.key == key).values(value=value)
    if connection.execute(change).rowcount == 0:
        connection.execute(insert(meta).values(key=key, value=value))


@dataclass
class Head:
    """The head of the store of ``name``, whose table of named numbers is ``meta``.

    ``accepted`` is the value of the operator's setting ``variable``; see `start`. ``on_accept``
    makes its changes in the transaction that accepts an older database. ``trouble`` says why
    nothing may be written any more.
    """

    folder: Path
    name: str
    meta: Table
    variable: str = ""
    accepted: int | None = None
    on_accept: Callable[[Connection], None] = lambda _: None
    older_accepted: bool = field(default=False, init=False)
    trouble: LocalError | None = field(default=None, init=False)

    def written(self) -> int:
        """Returns the highest number in the folder, 0 if there is none. Raises LocalError."""
        try:
            return max(self._numbers(), default=0)
        except OSError as error:
            raise LocalError("unavailable", f"cannot read the head: {error.strerror}") from error

    def write(self, number: int) -> None:
        """Writes a number durably, even if the folder has a higher one. Raises LocalError."""
        try:
            self._file(number).touch(mode=0o600)
            sync_directory(self.folder)
            for lower in [each for each in self._numbers() if each < number]:
                self._file(lower).unlink(missing_ok=True)  # another replica may remove it too
        except OSError as error:
            raise LocalError("unavailable", f"cannot write the head: {error.strerror}") from error

    def advance(self, connection: Connection) -> int:
        """Increments the database's number in this transaction; the caller must `write` the result.

        If the old number is below the folder's, this and all later calls raise LocalError
        ``unavailable``.
        """
        number = self._read(connection)
        if self.trouble is None and number < self.written():
            self.trouble = LocalError(
                "unavailable",
                "the store was replaced by an older one while the service ran; restart the service",
            )
        if self.trouble is not None:
            raise self.trouble
        write_number(connection, self.meta, KEY, number + 1)
        return number + 1

    def start(self, connection: Connection) -> int:
        """Returns the number of a database that is being opened; the caller must `write` it.

        Raises LocalError ``unavailable`` if the number is below the folder's, unless the operator's
        setting names the folder's number. Then the database gets a higher number than the folder's,
        so the setting works only once.
        """
        number, head = self._read(connection), self.written()
        if number < head:
            if self.accepted != head:
                raise LocalError(
                    "unavailable",
                    f"it is empty or an older copy: its head is {number}, and {head} in "
                    f"{self.folder}. It has forgotten what was answered since: who reported, who "
                    "was revoked, what was spent. Restore the newest copy, or set "
                    f"{self.variable}={head} to go on without",
                )
            self.older_accepted, number = True, head + 1
            write_number(connection, self.meta, KEY, number)
            self.on_accept(connection)
        return number

    def _file(self, number: object) -> Path:
        return self.folder / f"{quote(self.name, safe='')}.head.{number}"

    def _numbers(self) -> list[int]:
        files = self.folder.iterdir()
        ends = [file.suffix[1:] for file in files if file == self._file(file.suffix[1:])]
        return [int(end) for end in ends if end.isdecimal()]

    def _read(self, connection: Connection) -> int:
        return read_number(connection, self.meta, KEY) or 0
