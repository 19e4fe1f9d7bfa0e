"""Which users a node serves, and which it has asked already. Durable: a user is asked at most once.

A user is one person, one episode, one report, over all runs. Before a user's episode is run the
user is marked as asked, in a synced transaction; a node that crashed in between asks somebody else
rather than the same user twice (the slot's lease runs out and the slot is given out again).

Who the users are, the node's owner says: a list of ids a node, each of one person. Only with
simulated users are ids made when they are needed (16 bytes from the system's CSPRNG): nothing then
keeps a person from being asked under many ids, which is for simulations and tests.

Every method that reads or writes raises LocalError ``unavailable`` when the file cannot be used: a
full disk, for one. Then nothing was changed.

One SQLite file per process; it is locked, so that two processes never share users. A commit waits
for the disk, so an event loop calls these methods in a thread.
"""

import secrets
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from riffle.common.protocol.errors import LocalError

FILE_NAME = "users.sqlite"
SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE users (
    user TEXT PRIMARY KEY,
    node TEXT NOT NULL,
    asked INTEGER NOT NULL DEFAULT 0 CHECK (asked IN (0, 1))
) WITHOUT ROWID;
CREATE INDEX users_waiting ON users (node) WHERE asked = 0;
PRAGMA user_version = 1;
"""


class Users:
    """The users of the nodes of one process. Threads take turns.

    ``given`` is node id -> its users; None: simulated users, invented as they are needed.

    Raises:
        LocalError: ``unavailable``: the directory is not writable, another process uses it, or a
            newer Riffle wrote it.
    """

    def __init__(self, state_dir: Path, given: Mapping[str, Iterable[str]] | None) -> None:
        self._path = state_dir / FILE_NAME
        self._invents = given is None
        self._aside: set[str] = set()
        self._turn = threading.RLock()
        try:
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._database = sqlite3.connect(
                self._path, isolation_level=None, timeout=1, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise LocalError(
                "unavailable", f"cannot use state directory {state_dir}: {error}"
            ) from error
        try:
            self._prepare()
            if given is not None:
                self._take(given)
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Release the file."""
        with self._turn:
            self._database.close()

    def waiting(self, node: str, count: int, *, make: bool = True) -> list[str]:
        """Up to ``count`` users of a node that were never asked; simulated ones are made."""
        query = "SELECT user FROM users WHERE node = ? AND asked = 0 LIMIT ?"
        rows = self._rows(query, (node, count + len(self._aside)))
        found = [str(row[0]) for row in rows if row[0] not in self._aside][:count]
        missing = count - len(found) if make and self._invents else 0
        fresh = [secrets.token_hex(16) for _ in range(missing)]
        self._all("INSERT INTO users (user, node) VALUES (?, ?)", [(u, node) for u in fresh])
        return found + fresh

    def mark_asked(self, users: Iterable[str]) -> None:
        """Note, durably, that these users' episodes are about to be run."""
        self._all("UPDATE users SET asked = 1 WHERE user = ?", [(user,) for user in users])

    def set_aside(self, users: Iterable[str]) -> None:
        """Do not offer these users again before the next start: a slot of theirs is still held."""
        self._aside.update(users)

    def forget(self, users: Iterable[str]) -> None:
        """Drop users that the node may not serve; they were never asked."""
        self._all("DELETE FROM users WHERE user = ? AND asked = 0", [(user,) for user in users])

    def check(self) -> None:
        """Raise LocalError ``unavailable`` while nobody could be marked as asked."""
        self._all(f"PRAGMA user_version = {SCHEMA_VERSION}", [()])

    def asked(self, node: str) -> int:
        """How many users of a node have been asked."""
        query = "SELECT COUNT(*) FROM users WHERE node = ? AND asked = 1"
        return int(str(self._rows(query, (node,))[0][0]))

    def _take(self, given: Mapping[str, Iterable[str]]) -> None:
        """Have these users and no others; who was asked stays asked, whichever node it was."""
        rows: list[tuple[str, ...]] = [
            (user, node) for node, users in given.items() for user in users
        ]
        unasked = "SELECT user FROM users WHERE asked = 0"
        self.forget([str(row[0]) for row in self._rows(unasked, ())])
        self._all("INSERT OR IGNORE INTO users (user, node) VALUES (?, ?)", rows)

    def _rows(self, query: str, values: tuple[str | int, ...]) -> list[tuple[object, ...]]:
        with self._turn:
            try:
                return self._database.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise LocalError("unavailable", f"cannot read {self._path}: {error}") from error

    def _all(self, statement: str, rows: list[tuple[str, ...]]) -> None:
        if not rows:
            return
        with self._turn:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany(statement, rows)
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise LocalError("unavailable", f"cannot write {self._path}: {error}") from error

    def _prepare(self) -> None:
        try:
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                self._database.execute(f"PRAGMA {pragma}")
            self._database.executescript("BEGIN EXCLUSIVE; COMMIT;")  # take the lock, and keep it
            version = int(self._database.execute("PRAGMA user_version").fetchone()[0])
            if version == 0:
                self._database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        except sqlite3.Error as error:
            raise LocalError(
                "unavailable",
                f"cannot open {self._path}: {error}; does another node process use it?",
            ) from error
        if version > SCHEMA_VERSION:
            raise LocalError(
                "unavailable",
                f"{self._path} has version {version}, newer than {SCHEMA_VERSION}; update Riffle",
            )
