"""Private keys on disk, encrypted under a key that is kept elsewhere."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.process.heads import HeadFolder
from riffle.common.protocol.errors import LocalError
from riffle.common.server.at_rest import (
    MAGIC,
    OVERHEAD,
    StorageCipher,
    create_file,
    erase_file,
    is_sealed,
    replace_file,
)
from riffle.coordinator.batches.keys import KeyRing
from riffle.shuffler.store.vault import BatchSecret, Vault

KEY = bytes(range(32))


@given(st.binary(max_size=200), st.text(max_size=40))
def test_sealed_data_opens_and_shows_nothing(data: bytes, name: str) -> None:
    sealed = StorageCipher(KEY).seal(data, name)
    assert StorageCipher(KEY).open(sealed, name) == data
    assert len(sealed) == len(data) + OVERHEAD
    assert len(data) < 8 or data not in sealed.removeprefix(MAGIC)


def test_sealing_the_same_data_twice_gives_different_files() -> None:
    assert StorageCipher(KEY).seal(b"key", "a") != StorageCipher(KEY).seal(b"key", "a")


def test_files_of_two_names_have_two_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a nonce that occurs in both reveals nothing."""
    monkeypatch.setattr("riffle.common.server.at_rest.os.urandom", bytes)
    one, other = (StorageCipher(KEY).seal(bytes(64), name) for name in "ab")
    assert one[: len(MAGIC) + 12] == other[: len(MAGIC) + 12]
    assert one[len(MAGIC) + 12 :][:64] != other[len(MAGIC) + 12 :][:64]


@pytest.mark.parametrize("at", [0, len(MAGIC), len(MAGIC) + 12, -1])
def test_every_changed_byte_is_refused(at: int) -> None:
    sealed = bytearray(StorageCipher(KEY).seal(b"key", "a"))
    sealed[at] ^= 1
    with pytest.raises(LocalError, match="the a "):
        StorageCipher(KEY).open(bytes(sealed), "a")


@pytest.mark.parametrize(
    ("key", "data", "message"),
    [
        (bytes(32), StorageCipher(KEY).seal(b"key", "a"), "does not open with this storage key"),
        (KEY, StorageCipher(KEY).seal(b"key", "b"), "made for something else"),
        (KEY, MAGIC, "does not open"),
        (KEY, MAGIC + bytes(20), "does not open"),
        (KEY, b"key", "is not encrypted"),
        (None, StorageCipher(KEY).seal(b"key", "a"), "is encrypted: give the storage key"),
    ],
    ids=["other key", "other name", "magic only", "too short", "in clear", "no key"],
)
def test_a_file_that_does_not_open_says_why(key: bytes | None, data: bytes, message: str) -> None:
    with pytest.raises(LocalError, match=message):
        StorageCipher(key).open(data, "a")


def test_without_a_key_files_are_in_clear() -> None:
    assert StorageCipher(None).open(StorageCipher(None).seal(b"key", "a"), "a") == b"key"
    assert not is_sealed(b"key")


def test_files_are_replaced_whole_and_erased(tmp_path: Path) -> None:
    file = tmp_path / "key"
    replace_file(file, b"one")
    other = os.open(file, os.O_RDONLY)  # an open descriptor still sees the overwritten bytes
    erase_file(file)
    erase_file(file)
    assert os.pread(other, 3, 0) != b"one"
    os.close(other)
    assert list(tmp_path.iterdir()) == []
    replace_file(file, b"two")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[bytes]]]:
    """What each sync makes durable, a file or the folder, and the contents of all files then."""
    seen: list[tuple[str, list[bytes]]] = []

    def sync(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        files = [file.read_bytes() for file in tmp_path.iterdir() if file.is_file()]
        seen.append((kind, sorted(files)))

    monkeypatch.setattr(os, "fsync", sync)
    return seen


@pytest.mark.parametrize("write", [replace_file, create_file])
def test_a_power_failure_finds_whole_files(
    tmp_path: Path,
    synced: list[tuple[str, list[bytes]]],
    write: Callable[[Path, bytes], object],
) -> None:
    """A file's bytes are synced before its name, and its name before anybody relies on it."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"old")
    write(old if write is replace_file else new, b"new")
    after = [b"new"] if write is replace_file else [b"new", b"old"]
    assert synced == [("file", [b"new", b"old"]), ("folder", after)]


def test_a_power_failure_finds_the_old_number_or_the_new_one(
    tmp_path: Path, synced: list[tuple[str, list[bytes]]]
) -> None:
    head = HeadFolder(tmp_path, "store")
    head.write(1)
    head.write(2)
    assert synced == [("folder", [b""]), ("folder", [b"", b""])]
    assert head.written() == 2


def test_a_power_failure_brings_no_secret_of_a_batch_back(
    tmp_path: Path, synced: list[tuple[str, list[bytes]]]
) -> None:
    """It is overwritten, and synced, under its name; the record of its hand-over goes last."""
    vault = Vault(tmp_path, StorageCipher(None))
    vault.put("batch", BatchSecret.generate())
    secret = (tmp_path / "batch.secret").read_bytes()
    vault.pin("batch", "digest")
    synced.clear()
    vault.destroy("batch")
    (_, first), (_, second), last = synced
    assert b"digest" in first and secret not in first
    assert len(second) == 1 and second != [b"digest"]
    assert last == ("folder", [])


def test_a_power_failure_brings_no_key_of_the_analyzer_back(
    tmp_path: Path, synced: list[tuple[str, list[bytes]]]
) -> None:
    keys = KeyRing(tmp_path, StorageCipher(None), lambda: 0.0)
    keys.init()
    (old,) = keys.records()
    private = keys._private_file(old.id).read_bytes()
    keys.activate(keys.make().id)
    synced.clear()
    keys.erase_unused(tuple)
    (_, _), (recorded, before), (_, erasing), (erased, after) = synced
    assert (recorded, erased) == ("folder", "folder"), "recorded before the file is erased"
    assert private in before and private not in erasing
    assert len(after) == len(erasing) - 1
