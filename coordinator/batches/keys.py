"""The analyzer's keys, in one folder; `coordinator.states` defines their states.

``keys.json`` holds ids, public halves and states. Every change replaces the whole file, and so is
atomic. ``<id>.key`` holds a private half, encrypted under the storage key. An erasure is recorded
in ``keys.json`` before ``<id>.key`` is erased. If a crash comes in between, a later call erases the
file. A key that is recorded as erased is never used. Replicas share the folder, change it under a
lock, and read ``keys.json`` again after another replica has replaced it.
"""

import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from riffle.common.process.heads import sync_directory
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.hpke import KeyPair
from riffle.common.protocol.signatures import key_id
from riffle.common.server.at_rest import StorageCipher, erase_file, replace_file
from riffle.coordinator.states import KEY, KeyEvent, KeyState, after

USABLE: tuple[KeyState, ...] = ("active", "expired")


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key without its private half. ``since`` is when its state began, in seconds since 1970."""

    id: str
    public: str
    state: KeyState
    since: int


_RECORDS = TypeAdapter(tuple[KeyRecord, ...], config=ConfigDict(strict=True))


class KeyRing:
    """The keys of one folder. `init` makes the folder and its first key."""

    def __init__(self, folder: Path, cipher: StorageCipher, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._cipher = cipher
        self._clock = clock
        self._read: tuple[tuple[int, int], tuple[KeyRecord, ...]] | None = None
        self._privates: dict[str, bytes] = {}

    def init(self) -> None:
        """Makes the folder and its first key, active at once; does nothing if keys exist."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._file.exists():
            with self._lock():
                self._write((replace(self._new_key(), state="active"),))

    def check(self) -> None:
        """Raises LocalError if no key is active, or a usable key is missing or not readable."""
        self.active()
        for record in self.records():
            if record.state in USABLE and self.private(record.public) is None:
                raise LocalError("unavailable", f"analyzer key {record.id} is missing")

    def records(self) -> tuple[KeyRecord, ...]:
        """Returns all keys that ever existed, oldest first.

        Raises LocalError ``unavailable`` if the folder cannot be read, or holds no keys.
        """
        try:
            status = self._file.stat()
            version = (status.st_mtime_ns, status.st_ino)
            read = self._read  # other threads reset it when they change the folder
            if read is None or read[0] != version:
                self._read = read = (version, _parse(self._file.read_bytes()))
                self._privates.clear()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", error)
            raise LocalError("unavailable", f"cannot read the analyzer keys: {reason}") from error
        return read[1]

    def active(self) -> str:
        """Returns the public key (hex) to which new batches are sealed.

        Raises LocalError ``unavailable`` if no key is active.
        """
        for record in self.records():
            if record.state == "active":
                return record.public
        raise LocalError("unavailable", "no analyzer key is active")

    def private(self, public: str) -> bytes | None:
        """Returns a public key's private half, or None if it is missing or the key may not be used.

        Raises LocalError if the storage key does not decrypt the private half.
        """
        records = {record.public: record for record in self.records()}
        record = records.get(public)
        if record is None or record.state not in USABLE:
            return None
        if public not in self._privates and self._private_file(record.id).exists():
            self._privates[public] = self._load(record)
        return self._privates.get(public)

    def make(self) -> KeyRecord:
        """Returns the pending key; makes one if there is none. A retry thus makes no second key."""
        with self._lock():
            records = self.records()
            pending = [record for record in records if record.state == "pending"]
            if pending:
                return pending[0]
            new = self._new_key()
            self._write((*records, new))
            return new

    def activate(self, identifier: str) -> KeyRecord:
        """Makes a pending key active and the active key expired. A second call changes nothing.

        Raises RemoteError ``not-found``, or ``wrong-state`` if the key is expired or erased.
        """
        with self._lock():
            record = next((record for record in self.records() if record.id == identifier), None)
            if record is None:
                raise RemoteError("not-found", "no analyzer key has this id")
            try:
                active = self._moved(record, "activate")
            except LocalError as error:
                raise RemoteError(
                    error.slug, f"analyzer key {record.id}: {error.detail}"
                ) from error
            if active is not record:
                self._write(tuple(self._activated(each, active) for each in self.records()))
            return active

    def _activated(self, record: KeyRecord, active: KeyRecord) -> KeyRecord:
        if record.id == active.id:
            return active
        return self._moved(record, "expire") if record.state == "active" else record

    def erase_unused(self, in_use: Callable[[], Collection[str]]) -> None:
        """Erases expired keys, with their files, except the public keys that ``in_use`` returns.

        No new batch is sealed to an expired key. This method reads the expired keys before it calls
        ``in_use``. So the answer of ``in_use`` covers all batches of these keys.
        """
        expired = {record.public for record in self.records() if record.state == "expired"}
        unused = expired - set(in_use()) if expired else expired
        erased = (record for record in self.records() if record.state == "erased")
        if not unused and not any(self._private_file(record.id).exists() for record in erased):
            return
        with self._lock():
            records = tuple(
                self._moved(record, "erase") if record.public in unused else record
                for record in self.records()
            )
            self._write(records)
            for record in records:
                if record.state == "erased":
                    erase_file(self._private_file(record.id))
            sync_directory(self._folder)

    def _moved(self, record: KeyRecord, event: KeyEvent) -> KeyRecord:
        """Returns the key's record after an event, unchanged if its state stays the same."""
        state = after(KEY, record.state, event)
        if state == record.state:
            return record
        return replace(record, state=state, since=int(self._clock()))

    # -- files -----------------------------------------------------------------------------------

    @property
    def _file(self) -> Path:
        return self._folder / "keys.json"

    def _private_file(self, identifier: str) -> Path:
        return self._folder / f"{identifier}.key"

    def _new_key(self) -> KeyRecord:
        pair = KeyPair.generate()
        identifier = key_id(pair.public)
        sealed = self._cipher.seal(pair.private.hex().encode(), _sealed_name(identifier))
        replace_file(self._private_file(identifier), sealed)
        return KeyRecord(identifier, pair.public.hex(), "pending", int(self._clock()))

    def _load(self, record: KeyRecord) -> bytes:
        data = self._private_file(record.id).read_bytes()
        text = self._cipher.open(data, _sealed_name(record.id)).decode("ascii", "replace")
        try:
            pair = KeyPair.from_private(bytes.fromhex(text))
        except ValueError as error:
            raise LocalError("unavailable", f"analyzer key {record.id} is damaged") from error
        if pair.public.hex() != record.public:
            raise LocalError("unavailable", f"the file of analyzer key {record.id} is another's")
        return pair.private

    def _write(self, records: tuple[KeyRecord, ...]) -> None:
        replace_file(
            self._file, json.dumps([asdict(record) for record in records], indent=1).encode()
        )
        self._read = None

    @contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            with (self._folder / "lock").open("w") as file:
                os.fchmod(file.fileno(), 0o600)  # like every file of the folder
                fcntl.flock(file, fcntl.LOCK_EX)
                self._read = None
                yield
        except OSError as error:
            raise LocalError("unavailable", f"cannot write in {self._folder}: {error}") from error


def _parse(document: bytes) -> tuple[KeyRecord, ...]:
    """Parses the records; raises ValueError if one is not valid, because ids become file names."""
    records = _RECORDS.validate_json(document)
    for record in records:
        if record.id != key_id(bytes.fromhex(record.public)):
            raise ValueError(f"{record.id[:32]!r} is not the id of its public key")
    return records


def _sealed_name(identifier: str) -> str:
    return f"analyzer key {identifier}"
