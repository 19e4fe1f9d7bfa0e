"""Secrets on disk, written durably and destroyed for good, and the reports stored under them."""

from pathlib import Path

import pytest

from riffle.common.protocol.errors import LocalError
from riffle.common.server.at_rest import MAGIC, StorageCipher
from riffle.shuffler.store.vault import BatchSecret, ReportCipher, SecretLostError, Vault

BATCH = "ab" * 16
CLEAR = StorageCipher(None)


def test_a_secret_comes_back(tmp_path: Path) -> None:
    secret = BatchSecret.generate()
    Vault(tmp_path / "secrets", CLEAR).put(BATCH, secret)
    assert Vault(tmp_path / "secrets", CLEAR).get(BATCH) == secret


def test_a_secret_in_use_is_not_replaced(tmp_path: Path) -> None:
    first, late = BatchSecret.generate(), BatchSecret.generate()
    assert Vault(tmp_path, CLEAR).put(BATCH, first) == first
    assert Vault(tmp_path, CLEAR).put(BATCH, late) == first
    assert Vault(tmp_path, CLEAR).get(BATCH) == first
    assert len(list(tmp_path.iterdir())) == 1


def test_a_vault_has_one_number_for_ever(tmp_path: Path) -> None:
    numbers = {Vault(tmp_path / "secrets", CLEAR).identity() for _ in range(3)}
    assert len(numbers) == 1
    assert numbers != {Vault(tmp_path / "other", CLEAR).identity()}
    (tmp_path / "secrets.id").write_text("what")
    with pytest.raises(LocalError, match=r"secrets\.id"):
        Vault(tmp_path / "secrets", CLEAR).identity()


def test_only_the_owner_reads_a_secret(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "secrets", CLEAR)
    vault.put(BATCH, BatchSecret.generate())
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "secrets").iterdir()} == {0o600}


def test_the_repr_shows_no_key() -> None:
    secret = BatchSecret.generate()
    assert secret.permutation.hex() not in repr(secret)
    assert repr(secret.permutation) not in repr(secret)
    assert repr(secret.outer.private) not in repr(secret)


def test_destroying_removes_every_trace_and_repeats(tmp_path: Path) -> None:
    vault = Vault(tmp_path, CLEAR)
    vault.put(BATCH, BatchSecret.generate())
    (tmp_path / f"{BATCH}.0123abcd.new").write_bytes(b"left by a crash while writing")
    vault.destroy(BATCH)
    vault.destroy(BATCH)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SecretLostError, match="missing"):
        vault.get(BATCH)


def test_an_unreadable_secret_is_not_lost(tmp_path: Path) -> None:
    """A directory that is not mounted, or a file that fails to be read, may come back."""
    vault = Vault(tmp_path / "secrets", CLEAR)
    (tmp_path / "secrets" / f"{BATCH}.secret").mkdir()
    for _ in range(2):
        with pytest.raises(LocalError) as caught:
            vault.get(BATCH)
        assert caught.value.slug == "unavailable"
        if (tmp_path / "secrets").exists():
            (tmp_path / "secrets" / f"{BATCH}.secret").rmdir()
            (tmp_path / "secrets").rmdir()


@pytest.mark.parametrize("data", [b"", b"riffle secret 1\n", b"x" * 80, b"riffle secret 2\n" * 5])
def test_a_damaged_secret_is_reported(tmp_path: Path, data: bytes) -> None:
    (tmp_path / f"{BATCH}.secret").write_bytes(data)
    with pytest.raises(SecretLostError, match="damaged"):
        Vault(tmp_path, CLEAR).get(BATCH)


def test_a_directory_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot make"):
        Vault(tmp_path / "file" / "secrets", CLEAR)


def test_a_secret_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "secrets", CLEAR)
    (tmp_path / "secrets").rmdir()
    with pytest.raises(LocalError, match="cannot write"):
        vault.put(BATCH, BatchSecret.generate())
    with pytest.raises(LocalError, match="cannot be written"):
        vault.probe()


def test_encrypted_secrets_come_back_under_their_key_only(tmp_path: Path) -> None:
    secret, key = BatchSecret.generate(), StorageCipher(bytes(range(32)))
    Vault(tmp_path, key).put(BATCH, secret)
    assert Vault(tmp_path, key).get(BATCH) == secret
    data = (tmp_path / f"{BATCH}.secret").read_bytes()
    assert data.startswith(MAGIC)
    assert secret.outer.private not in data and secret.permutation not in data
    for other in (StorageCipher(bytes(32)), CLEAR):
        with pytest.raises(LocalError, match="storage key") as caught:
            Vault(tmp_path, other).get(BATCH)
        assert not isinstance(caught.value, SecretLostError), "a wrong key must cost no batch"


def test_one_batchs_secret_is_not_taken_for_anothers(tmp_path: Path) -> None:
    vault, other = Vault(tmp_path, StorageCipher(bytes(32))), "cd" * 16
    vault.put(BATCH, BatchSecret.generate())
    (tmp_path / f"{BATCH}.secret").rename(tmp_path / f"{other}.secret")
    with pytest.raises(LocalError, match="made for something else"):
        vault.get(other)


def test_a_secret_cut_short_is_lost(tmp_path: Path) -> None:
    vault = Vault(tmp_path, StorageCipher(bytes(32)))
    vault.put(BATCH, BatchSecret.generate())
    file = tmp_path / f"{BATCH}.secret"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SecretLostError, match="damaged"):
        vault.get(BATCH)


# Stored reports

SLOTS, REPORTS = [3, 4, 7], b"three reports" * 3
SECRET = BatchSecret.generate()


def test_stored_reports_are_read_again_and_hidden() -> None:
    first, second = (ReportCipher(BATCH, SECRET).encrypt(SLOTS, REPORTS) for _ in range(2))
    assert ReportCipher(BATCH, SECRET).decrypt(SLOTS, first) == REPORTS
    assert REPORTS[:8] not in first
    assert first != second, "a nonce is never used again"


@pytest.mark.parametrize("fault", ["bit", "cut", "slots", "batch", "outer", "permutation", "none"])
def test_reports_that_are_damaged_or_misplaced_are_not_released(fault: str) -> None:
    """Both halves of the secret are needed: with either one erased nothing can be read."""
    kept, other = ReportCipher(BATCH, SECRET).encrypt(SLOTS, REPORTS), BatchSecret.generate()
    secret = {
        "outer": BatchSecret(other.outer, SECRET.permutation),
        "permutation": BatchSecret(SECRET.outer, other.permutation),
    }.get(fault, SECRET)
    changed = {"bit": kept[:-1] + bytes([kept[-1] ^ 1]), "cut": kept[:-1], "none": b""}
    batch = "cd" * 16 if fault == "batch" else BATCH
    slots = [3, 4, 8] if fault == "slots" else SLOTS
    with pytest.raises(LocalError, match="none is released"):
        ReportCipher(batch, secret).decrypt(slots, changed.get(fault, kept))
