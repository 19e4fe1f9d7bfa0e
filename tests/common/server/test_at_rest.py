"""Private keys on disk, encrypted under a key that is kept elsewhere."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.protocol.errors import LocalError
from riffle.common.server.at_rest import (
    MAGIC,
    OVERHEAD,
    StorageCipher,
    erase_file,
    is_sealed,
    replace_file,
)

KEY = bytes(range(32))


@given(st.binary(max_size=200), st.text(max_size=40))
def test_sealed_data_opens_and_shows_nothing(data: bytes, name: str) -> None:
    sealed = StorageCipher(KEY).seal(data, name)
    assert StorageCipher(KEY).open(sealed, name) == data
    assert len(sealed) == len(data) + OVERHEAD
    assert len(data) < 8 or data not in sealed.removeprefix(MAGIC)


def test_sealing_the_same_data_twice_gives_different_files() -> None:
    assert StorageCipher(KEY).seal(b"key", "a") != StorageCipher(KEY).seal(b"key", "a")


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
