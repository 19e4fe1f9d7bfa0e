"""Secrets on disk: written durably, private, destroyed for good."""

from pathlib import Path

import pytest

from common.errors import LocalError
from shuffler.vault import BatchSecret, SecretLostError, Vault

BATCH = "ab" * 16


def test_a_secret_comes_back(tmp_path: Path) -> None:
    secret = BatchSecret.generate()
    Vault(tmp_path / "secrets").put(BATCH, secret)
    assert Vault(tmp_path / "secrets").get(BATCH) == secret


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "secrets")
    vault.put(BATCH, BatchSecret.generate())
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "secrets").iterdir()} == {0o600}


def test_the_repr_shows_no_key() -> None:
    secret = BatchSecret.generate()
    assert secret.permutation.hex() not in repr(secret)
    assert repr(secret.permutation) not in repr(secret)
    assert repr(secret.outer.private) not in repr(secret)


def test_destroying_removes_every_trace_and_repeats(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.put(BATCH, BatchSecret.generate())
    (tmp_path / f"{BATCH}.new").write_bytes(b"left by a crash while writing")
    vault.destroy(BATCH)
    vault.destroy(BATCH)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SecretLostError, match="missing"):
        vault.get(BATCH)


def test_what_cannot_be_read_now_is_not_lost(tmp_path: Path) -> None:
    """A directory that is not mounted, or a file that fails to be read, may come back."""
    vault = Vault(tmp_path / "secrets")
    (tmp_path / "secrets" / f"{BATCH}.secret").mkdir()
    for _ in range(2):
        with pytest.raises(LocalError) as caught:
            vault.get(BATCH)
        assert caught.value.slug == "unavailable"
        if (tmp_path / "secrets").exists():
            (tmp_path / "secrets" / f"{BATCH}.secret").rmdir()
            (tmp_path / "secrets").rmdir()


@pytest.mark.parametrize("data", [b"", b"riffle secret 1\n", b"x" * 80, b"riffle secret 2\n" * 5])
def test_a_damaged_secret_is_told(tmp_path: Path, data: bytes) -> None:
    (tmp_path / f"{BATCH}.secret").write_bytes(data)
    with pytest.raises(SecretLostError, match="damaged"):
        Vault(tmp_path).get(BATCH)


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot make"):
        Vault(tmp_path / "file" / "secrets")


def test_a_secret_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "secrets")
    (tmp_path / "secrets").rmdir()
    with pytest.raises(LocalError, match="cannot write"):
        vault.put(BATCH, BatchSecret.generate())
    with pytest.raises(LocalError, match="cannot be written"):
        vault.probe()
