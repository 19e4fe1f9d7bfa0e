"""The head of a store: a number outside the database that reveals an outdated database.

A transaction that must not be forgotten raises the number in the database. The service writes this
number to the head before it answers anybody. Services refuse a database whose number is below its
head.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy import Connection, Table, insert, select, update

from riffle.common.process.heads import HeadFolder
from riffle.common.protocol.errors import LocalError

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
class Head(HeadFolder):
    """The head of the store called ``name``, whose table of named numbers is ``meta``.

    ``accepted`` is the value of the operator's setting ``variable``; see `start`. `start` calls
    ``on_accept`` in the transaction that accepts an older database. ``trouble`` says why nothing
    may be written any more.
    """

    meta: Table
    variable: str = ""
    accepted: int | None = None
    on_accept: Callable[[Connection], None] = lambda _: None
    older_accepted: bool = field(default=False, init=False)
    trouble: LocalError | None = field(default=None, init=False)

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
        setting names the folder's number. Accepting the database raises its number above the
        folder's, so the setting works only once.
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

    def _read(self, connection: Connection) -> int:
        return read_number(connection, self.meta, KEY) or 0
