"""The analyzer's keys: one folder, one table of states.

    (made) -> pending -> active -> expired -> erased

- pending: made, its public half on its way to the pins of nodes and shuffler; seals nothing yet;
- active: new batches are sealed to it; there is exactly one, so activating a key expires the last;
- expired: opens the batches that were issued under it, seals no new one;
- erased: no unsettled batch names it any more; its private half is destroyed.

``keys.json`` holds ids, public halves and states, and is replaced as a whole: that is the
transaction. ``<id>.key`` holds a private half, encrypted by the storage key. What is erased is
recorded first and destroyed after, by whoever next looks; nothing that is recorded as erased is
ever used. Replicas share the folder: changes are made under a lock, and looked up anew when the
file was replaced.
"""

import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from pydantic import ConfigDict, TypeAdapter

from riffle.common.protocol.descriptor import key_id
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.hpke import KeyPair
from riffle.common.server.at_rest import FileCipher, erase_file, replace_file, sync_directory

KeyState = Literal["pending", "active", "expired", "erased"]

TRANSITIONS: dict[KeyState, tuple[KeyState, ...]] = {
    "pending": ("active",),
    "active": ("expired",),
    "expired": ("erased",),
    "erased": (),
}
USABLE: tuple[KeyState, ...] = ("active", "expired")


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key without its private half. ``since``: when it entered its state, seconds since 1970."""

    id: str
    public: str
    state: KeyState
    since: int


_RECORDS = TypeAdapter(tuple[KeyRecord, ...], config=ConfigDict(strict=True))


class Keys(Protocol):
    """What the analyzer needs of its keys."""

    def active(self) -> str:
        """Public key, hex, that new batches are sealed to."""
        ...

    def private(self, public: str) -> bytes | None:
        """Private half of a key that may open batches; None when there is none here."""
        ...


@dataclass(frozen=True, slots=True)
class OneKey:
    """`Keys` of one key pair that does not change: for what runs once, as an audit does."""

    pair: KeyPair

    def active(self) -> str:
        """See `Keys`."""
        return self.pair.public.hex()

    def private(self, public: str) -> bytes | None:
        """See `Keys`."""
        return self.pair.private if public == self.active() else None


class KeyRing:
    """The keys of one folder. Made with its first key by `init`."""

    def __init__(self, folder: Path, cipher: FileCipher, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._cipher = cipher
        self._clock = clock
        self._read: tuple[tuple[int, int], tuple[KeyRecord, ...]] | None = None
        self._privates: dict[str, bytes] = {}

    def init(self) -> None:
        """Make folder and first key, active at once; nothing where there are keys."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._file.exists():
            with self._lock():
                self._write((replace(self._make(), state="active"),))

    def check(self) -> None:
        """Raise LocalError unless every key that is needed is there and opens."""
        self.active()
        for record in self.records():
            if record.state in USABLE and self.private(record.public) is None:
                raise LocalError("unavailable", f"analyzer key {record.id} is missing")

    def records(self) -> tuple[KeyRecord, ...]:
        """All keys there ever were, oldest first.

        Raises:
            LocalError: ``unavailable``: the folder cannot be read, or holds no keys.
        """
        try:
            found = self._file.stat()
            version = (found.st_mtime_ns, found.st_ino)
            read = self._read  # other threads forget it when they change something
            if read is None or read[0] != version:
                self._read = read = (version, _parsed(self._file.read_bytes()))
                self._privates.clear()
        except (OSError, ValueError) as error:
            raise LocalError("unavailable", f"cannot read {self._file}: {error}") from error
        return read[1]

    def active(self) -> str:
        """See `Keys`.

        Raises:
            LocalError: ``unavailable``: there is none.
        """
        for record in self.records():
            if record.state == "active":
                return record.public
        raise LocalError("unavailable", f"no key in {self._folder} is active")

    def private(self, public: str) -> bytes | None:
        """See `Keys`.

        Raises:
            LocalError: the storage key does not open it.
        """
        records = {record.public: record for record in self.records()}
        record = records.get(public)
        if record is None or record.state not in USABLE:
            return None
        if public not in self._privates and self._private_file(record.id).exists():
            self._privates[public] = self._load(record)
        return self._privates.get(public)

    def make(self) -> KeyRecord:
        """A new pending key; the one that is pending already, if any: a retry makes no second."""
        with self._lock():
            records = self.records()
            pending = [record for record in records if record.state == "pending"]
            if pending:
                return pending[0]
            made = self._make()
            self._write((*records, made))
            return made

    def activate(self, wanted: str) -> KeyRecord:
        """Seal new batches to a pending key; the active one expires. Repeats harmlessly.

        Raises:
            RemoteError: ``not-found``; ``wrong-state`` when it was active before.
        """
        with self._lock():
            record = self._find(wanted)
            if record.state == "active":
                return record
            _check(record, "active")
            now = int(self._clock())
            changed = {
                one.id: replace(one, state="expired", since=now)
                for one in self.records()
                if one.state == "active"
            }
            changed[record.id] = replace(record, state="active", since=now)
            self._write(tuple(changed.get(one.id, one) for one in self.records()))
            return changed[record.id]

    def erase_unused(self, in_use: Callable[[], Collection[str]]) -> None:
        """Erase expired keys whose public half is not ``in_use``.

        ``in_use`` is asked once it is known which have expired: a key that expires while it looks
        may have sealed a batch that it did not see.
        """
        expired = {one.public for one in self.records() if one.state == "expired"}
        due = expired - set(in_use()) if expired else expired
        erased = (one for one in self.records() if one.state == "erased")
        if not due and not any(self._private_file(one.id).exists() for one in erased):
            return
        with self._lock():
            now = int(self._clock())
            records = tuple(
                replace(one, state="erased", since=now)
                if one.public in due and "erased" in TRANSITIONS[one.state]
                else one
                for one in self.records()
            )
            self._write(records)
            for one in records:
                if one.state == "erased":
                    erase_file(self._private_file(one.id))
            sync_directory(self._folder)

    # -- files -----------------------------------------------------------------------------------

    @property
    def _file(self) -> Path:
        return self._folder / "keys.json"

    def _private_file(self, identifier: str) -> Path:
        return self._folder / f"{identifier}.key"

    def _make(self) -> KeyRecord:
        pair = KeyPair.generate()
        identifier = key_id(pair.public)
        sealed = self._cipher.seal(pair.private.hex().encode(), _name(identifier))
        replace_file(self._private_file(identifier), sealed)
        return KeyRecord(identifier, pair.public.hex(), "pending", int(self._clock()))

    def _load(self, record: KeyRecord) -> bytes:
        data = self._private_file(record.id).read_bytes()
        text = self._cipher.open(data, _name(record.id)).decode("ascii", "replace")
        try:
            pair = KeyPair.from_private(bytes.fromhex(text))
        except ValueError as error:
            raise LocalError("unavailable", f"analyzer key {record.id} is damaged") from error
        if pair.public.hex() != record.public:
            raise LocalError("unavailable", f"the file of analyzer key {record.id} is another's")
        return pair.private

    def _find(self, wanted: str) -> KeyRecord:
        for record in self.records():
            if record.id == wanted:
                return record
        raise RemoteError("not-found", "no analyzer key has this id")

    def _write(self, records: tuple[KeyRecord, ...]) -> None:
        replace_file(self._file, json.dumps([asdict(one) for one in records], indent=1).encode())
        self._read = None

    @contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            with (self._folder / "lock").open("w") as file:
                os.fchmod(file.fileno(), 0o600)  # as every file of the folder
                fcntl.flock(file, fcntl.LOCK_EX)
                self._read = None
                yield
        except OSError as error:
            raise LocalError("unavailable", f"cannot write in {self._folder}: {error}") from error


def _parsed(document: bytes) -> tuple[KeyRecord, ...]:
    """Records as written; ValueError for anything else: an id is part of a file's name."""
    records = _RECORDS.validate_json(document)
    for record in records:
        if record.id != key_id(bytes.fromhex(record.public)):
            raise ValueError(f"{record.id[:32]!r} is not the id of its public key")
    return records


def _name(identifier: str) -> str:
    return f"analyzer key {identifier}"


def _check(record: KeyRecord, to: KeyState) -> None:
    if to not in TRANSITIONS[record.state]:
        raise RemoteError("wrong-state", f"a key that is {record.state} cannot become {to}")
