"""Records durably which users a node process asked for an episode, so that it asks nobody twice.

Before a node runs a user's episode, it marks the user as asked, in a synced transaction. If the
node then crashes, it never asks that user again (with epochs: not before the next epoch).

The file of users and the shuffler know a user by `opaque_id`. Without the owner's key, nobody can
compute these ids, so nobody can test whether a person took part, or take that person's place.

Each process locks its SQLite file, so that no two processes share users. Every method that reads or
writes raises LocalError ``unavailable``, and changes nothing, if the file cannot be used. Commits
wait for the disk, so an event loop calls these methods in a thread.
"""

import hmac
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from riffle.common.protocol.descriptor import MAX_EXACT, bars_until, may_report
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.wire import Lease
from riffle.node_client.ledger import UNCHARGED, Charge, PersonalLedger, bind_key

FILE_NAME = "users.sqlite"
LABEL_USER = b"riffle v1 user\x00"
SCHEMA_VERSION = 1
BATCHES_IN_MEMORY = 16
_SCHEMA = """
CREATE TABLE users (
    user TEXT PRIMARY KEY,
    node TEXT NOT NULL,
    barred_until INTEGER NOT NULL DEFAULT 0,
    episode TEXT
) WITHOUT ROWID;
CREATE INDEX users_waiting ON users (node, barred_until);
PRAGMA user_version = 1;
"""


def opaque_id(key: bytes, user: str) -> str:
    """Returns the id by which the shuffler knows a user: 16 bytes of HMAC-SHA256, hex."""
    return hmac.digest(key, LABEL_USER + user.encode(), "sha256")[:16].hex()


class Users:
    """The users of all nodes of one process, safe to use from several threads.

    ``listed`` maps node ids to user ids, or is None if users are simulated or named by an app.
    ``key`` is the key of `opaque_id`. ``ledger`` is the owner's ledger, if people have a lifetime
    limit. Raises LocalError ``unavailable`` if another process uses the file or a newer Riffle
    wrote it, and ``wrong-state`` if the file belongs to another key.
    """

    def __init__(
        self,
        state_dir: Path,
        listed: Mapping[str, Iterable[str]] | None,
        key: bytes | None = None,
        ledger: PersonalLedger | None = None,
    ) -> None:
        self._path = state_dir / FILE_NAME
        self._simulated = listed is None
        self._aside: dict[str, int] = {}
        self._over_limit: dict[str, set[str]] = {}
        self.ledger = ledger
        self._lock = threading.RLock()
        try:
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._database = sqlite3.connect(
                self._path, isolation_level=None, timeout=1, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            detail = f"cannot use state directory {state_dir}: {error}"
            raise LocalError("unavailable", detail) from error
        try:
            self._prepare(key)
            if listed is not None:
                self.replace_unasked(listed)
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Releases the file."""
        with self._lock:
            self._database.close()

    def next_users(
        self, node: str, count: int, charge: Charge = UNCHARGED, *, invent: bool = True
    ) -> list[str]:
        """Returns up to ``count`` users of a node who may be asked for a batch.

        If users are simulated, invents ids as needed. One person could be asked under several such
        ids.
        """
        users = self._waiting(node, count, charge)
        while self.ledger and (over := {*users} - {*self.ledger.affordable(users, charge)}):
            if len(self._over_limit) >= BATCHES_IN_MEMORY:
                self._over_limit.clear()
            self._over_limit.setdefault(charge.batch_id, set()).update(over)
            users = self._waiting(node, count, charge)
        missing = count - len(users) if invent and self._simulated else 0
        fresh = [secrets.token_hex(16) for _ in range(missing)]
        self._write("INSERT INTO users (user, node) VALUES (?, ?)", [(u, node) for u in fresh])
        return users + fresh

    def admit(self, user: str, charge: Charge | None = None) -> None:
        """Adds a user whom an app names, unless the user is known.

        Raises LocalError ``user-unavailable`` if the user may not be asked for the batch of
        ``charge`` or, if ``charge`` is None, for any batch.
        """
        self._write("INSERT OR IGNORE INTO users (user, node) VALUES (?, '')", [(user,)])
        ((until,),) = self._rows("SELECT barred_until FROM users WHERE user = ?", (user,))
        if until == MAX_EXACT or (charge and not may_report(until, charge.epoch)):
            raise LocalError("user-unavailable", "this user was asked before: once is the most")
        if charge and self.ledger and not self.ledger.affordable([user], charge):
            detail = f"this user would pass their lifetime limit, {self.ledger.limit}, or was "
            detail += "charged for this batch before; see 'riffle budget'"
            raise LocalError("user-unavailable", detail)

    def _waiting(self, node: str, count: int, charge: Charge) -> list[str]:
        skipped = {user for user, until in self._aside.items() if until > charge.start}
        skipped |= self.over_limit(charge)
        query = "SELECT user FROM users WHERE node = ? AND barred_until <= ? LIMIT ?"
        rows = self._rows(query, (node, charge.start, count + len(skipped)))
        return [str(row[0]) for row in rows if row[0] not in skipped][:count]

    def over_limit(self, charge: Charge) -> set[str]:
        """Returns the users whom `next_users` left out because of their lifetime limit."""
        return self._over_limit.get(charge.batch_id, set())

    def mark_asked(
        self, users: Sequence[str], charge: Charge = UNCHARGED, episode: str | None = None
    ) -> Sequence[str]:
        """Records durably that these users' episodes are about to be run, and charges them.

        An app passes the user's ``episode`` (`participant.Row`). Returns the users whose episodes
        may now be run. Users who have meanwhile spent their lifetime limit are left out.
        """
        if self.ledger is not None and users:
            users = self.ledger.charge(users, charge)
        mark, until = "UPDATE users SET barred_until = ?, episode = ?", bars_until(charge.epoch)
        self._write(f"{mark} WHERE user = ?", [(until, episode, user) for user in users])
        return users

    def give_back(self, leases: Sequence[Lease], charge: Charge) -> None:
        """Gives back the charges for reports. No part of these reports may have been sent."""
        if self.ledger is not None and leases:
            with suppress(LocalError):  # if this fails, they stay charged
                self.ledger.give_back([lease.user for lease in leases], charge)

    def set_aside(self, users: Iterable[str], charge: Charge = UNCHARGED) -> None:
        """Skips users who have reported or hold a slot elsewhere, until the process starts again.

        With epochs, skips these users only until the epoch ends.
        """
        self._aside.update(dict.fromkeys(users, bars_until(charge.epoch)))

    def episodes(self) -> list[str]:
        """Returns the open episodes of an app's users, each a `participant.Row` as JSON text."""
        return [row[0] for row in self._rows("SELECT episode FROM users WHERE episode NOTNULL", ())]

    def keep_episode(self, user: str, episode: str | None) -> None:
        """Replaces or deletes a user's episode. Overwrites the old one in SQLite's file and log.

        Copies in a file system, on a flash disk or in a backup are not overwritten.
        """
        self._write("UPDATE users SET episode = ? WHERE user = ?", [(episode, user)])
        self._rows("PRAGMA wal_checkpoint(TRUNCATE)", ())

    def forget(self, users: Iterable[str]) -> None:
        """Deletes users whom the node may not serve, except those who were asked."""
        delete = "DELETE FROM users WHERE user = ? AND barred_until = 0"
        self._write(delete, [(user,) for user in users])

    def check_writable(self) -> None:
        """Raises LocalError ``unavailable`` if no user could be marked as asked now."""
        self._write(f"PRAGMA user_version = {SCHEMA_VERSION}", [()])

    def replace_unasked(self, listed: Mapping[str, Iterable[str]]) -> None:
        """Replaces all users by the listed ones. Users who were asked keep their `barred_until`."""
        unasked = self._rows("SELECT user FROM users WHERE barred_until = 0", ())
        self.forget([str(row[0]) for row in unasked])
        self._write("UPDATE users SET node = ''", [()])
        rows: list[tuple[str, ...]] = [(u, node) for node, users in listed.items() for u in users]
        add = "INSERT INTO users (user, node) VALUES (?, ?)"
        self._write(f"{add} ON CONFLICT (user) DO UPDATE SET node = excluded.node", rows)

    def _rows(self, query: str, values: tuple[str | int, ...]) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._database.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise LocalError("unavailable", f"cannot read {self._path}: {error}") from error

    def _write(self, statement: str, rows: Sequence[tuple[str | int | None, ...]]) -> None:
        """Executes a statement for each row, in one transaction."""
        if not rows:
            return
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany(statement, rows)
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise LocalError("unavailable", f"cannot write {self._path}: {error}") from error

    def _prepare(self, key: bytes | None) -> None:
        try:
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                self._database.execute(f"PRAGMA {pragma}")
            self._database.execute("PRAGMA secure_delete = ON")
            self._database.executescript("BEGIN EXCLUSIVE; COMMIT;")  # take the lock and keep it
            version = int(self._database.execute("PRAGMA user_version").fetchone()[0])
            if version > SCHEMA_VERSION:
                detail = f"{self._path} has version {version}, newer than {SCHEMA_VERSION}"
                raise LocalError("unavailable", f"{detail}; update Riffle")
            if version == 0:
                self._database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            bind_key(self._database, self._path, key)
        except sqlite3.Error as error:
            detail = f"cannot open {self._path}: {error}; does another node process use it?"
            raise LocalError("unavailable", detail) from error
