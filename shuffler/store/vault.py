"""Secrets of batches, which erasure destroys, and the encryption of stored reports.

A batch's secret is the private key of its outer seals and the key of its permutation. The secret is
one small file outside the database, because a database's pages and logs keep deleted data. Once the
file is gone, any reports left in the database are ciphertext without a key, and nobody can
recompute the permutation.

The shuffler opens a report's outer seal once, on arrival. The reports of an upload are then
encrypted together (AES-256-GCM), under a key derived from the batch's secret. Stored reports are
therefore as secure as reports under their outer seals.
"""

import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from riffle.common.process.heads import sync_directory
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import KeyPair
from riffle.common.server.at_rest import (
    OVERHEAD,
    StorageCipher,
    create_file,
    erase_file,
)

MAGIC = b"riffle secret 1\n"
KEY_BYTES = 32
SECRET_BYTES = len(MAGIC) + 2 * KEY_BYTES


@dataclass(frozen=True, slots=True)
class BatchSecret:
    """The key pair of a batch's outer seals, and the 32-byte key of its permutation."""

    outer: KeyPair
    permutation: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> "BatchSecret":
        """Returns a new secret from the system's CSPRNG."""
        return cls(KeyPair.generate(), os.urandom(KEY_BYTES))


class SecretLostError(LocalError):
    """Raised if a batch's secret is gone for good: damaged, or missing from an existing vault."""

    def __init__(self, batch_id: str, what: str) -> None:
        super().__init__(
            "internal", f"the secret of batch {batch_id} is {what}; its reports open no more"
        )


class Vault:
    """The directory of batch secrets, which all replicas share.

    Writes sync the file and the directory before they return.
    """

    def __init__(self, directory: Path, cipher: StorageCipher) -> None:
        self._directory = directory
        self._cipher = cipher
        try:
            for folder in (directory.parent, directory):  # mkdir sets only the last folder's mode
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError("unavailable", f"cannot make {directory}: {error}") from error

    def put(self, batch_id: str, secret: BatchSecret) -> BatchSecret:
        """Stores a secret, unless the batch already has a secret. Returns the stored secret.

        A late replica, whose transaction will fail, cannot replace a secret in use. If a crash left
        a secret without a batch, the next deposit of the batch uses that secret. Raises the errors
        of `get`, and LocalError ``unavailable`` if the secret cannot be written.
        """
        data = MAGIC + secret.outer.private + secret.permutation
        try:
            added = create_file(self._path(batch_id), self._cipher.seal(data, _name(batch_id)))
        except OSError as error:
            detail = f"cannot write a batch secret: {error.strerror}"
            raise LocalError("unavailable", detail) from error
        return secret if added else self.get(batch_id)

    def identity(self) -> int:
        """Returns the vault's number, drawn once; raises LocalError if the vault is unusable."""
        path = self._directory.with_suffix(".id")
        try:
            if not path.exists():
                create_file(path, str(int.from_bytes(os.urandom(7), "big")).encode())
            return int(path.read_text())
        except (OSError, ValueError) as error:
            raise LocalError("unavailable", f"cannot use {path}: {error}") from error

    def get(self, batch_id: str) -> BatchSecret:
        """Returns the secret of a batch; raises SecretLostError if it is missing or damaged.

        Raises LocalError ``unavailable`` if the secret cannot be read now, or if this process has
        the wrong storage key. A later attempt may succeed.
        """
        try:
            data = self._path(batch_id).read_bytes()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._directory.is_dir():
                raise SecretLostError(batch_id, "missing") from error
            detail = f"cannot read a batch secret: {error.strerror}"
            raise LocalError("unavailable", detail) from error
        if len(data) not in (SECRET_BYTES, SECRET_BYTES + OVERHEAD):
            raise SecretLostError(batch_id, "damaged")
        try:
            data = self._cipher.open(data, _name(batch_id))
        except LocalError as error:
            # The operator can correct a wrong storage key, so it must not cost the batch.
            raise LocalError("unavailable", error.detail) from error
        keys = data.removeprefix(MAGIC)
        if not data.startswith(MAGIC) or len(data) != SECRET_BYTES:
            raise SecretLostError(batch_id, "damaged")
        return BatchSecret(KeyPair.from_private(keys[:KEY_BYTES]), keys[KEY_BYTES:])

    def pin(self, batch_id: str, sha256: str) -> None:
        """Records the digest of a batch's hand-over, beside its secret.

        Raises SecretLostError if another digest is recorded already: somebody may have replaced the
        database by an older copy and filled the batch with other reports. Two hand-overs that
        differ in a few reports would reveal these reports. Raises LocalError ``unavailable`` if the
        file is unusable.
        """
        file = self._directory / f"{batch_id}.released"
        try:
            is_first = create_file(file, sha256.encode())
            is_same = is_first or file.read_bytes() == sha256.encode()
        except OSError as error:
            detail = f"cannot record a hand-over: {error.strerror}"
            raise LocalError("unavailable", detail) from error
        if not is_same:
            raise SecretLostError(batch_id, "used up by another hand-over")

    def destroy(self, batch_id: str) -> None:
        """Erases a batch's secret, if it still exists, then the record of the batch's hand-over."""
        files = self._directory.glob(f"{batch_id}.*")
        for file in sorted(files, key=lambda file: file.suffix == ".released"):
            erase_file(file)
        sync_directory(self._directory)

    def probe(self) -> None:
        """Raises LocalError ``unavailable`` if secrets cannot be written and read here."""
        if not os.access(self._directory, os.R_OK | os.W_OK | os.X_OK):
            raise LocalError("unavailable", "the folder of batch secrets cannot be written")

    def _path(self, batch_id: str) -> Path:
        return self._directory / f"{batch_id}.secret"


def _name(batch_id: str) -> str:
    return f"secret of batch {batch_id}"


LABEL_STORED = b"riffle v1 stored reports\x00"
LABEL_TAGS = b"riffle v1 tags of keys\x00"
TAG_BYTES = 16


class ReportCipher:
    """Encrypts and decrypts the stored reports of one batch, or their sum.

    Each key of the cipher is HKDF-SHA256 of the whole secret, under a label that no other key has.
    A ``part`` names stored data: the slots of reports stored together, or the number of reports in
    a sum.
    """

    def __init__(self, batch_id: str, secret: BatchSecret) -> None:
        self._secret = secret.outer.private + secret.permutation
        self._cipher = StorageCipher(self._derive(LABEL_STORED))
        self._batch_id = batch_id
        self._tag_key = b""

    def encrypt(self, part: Sequence[int] | int, data: bytes) -> bytes:
        """Returns ``data``, the reports or the sum of ``part``, encrypted for the store."""
        return self._cipher.seal(data, self._name(part))

    def decrypt(self, part: Sequence[int] | int, stored: bytes) -> bytes:
        """Returns the reports of ``part`` or, if ``part`` is a number, their sum.

        Raises LocalError if the stored form is damaged or belongs to another part.
        """
        try:
            return self._cipher.open(stored, self._name(part))
        except LocalError as error:
            detail = "stored reports, or their secret, are damaged; none is released"
            raise LocalError("internal", detail) from error

    def tag(self, key: bytes) -> str:
        """Returns the hex tag by which the store finds a second report with this public key."""
        self._tag_key = self._tag_key or self._derive(LABEL_TAGS)
        return hmac.digest(self._tag_key, key, "sha256")[:TAG_BYTES].hex()

    def _derive(self, label: bytes) -> bytes:
        return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=label).derive(self._secret)

    def _name(self, part: Sequence[int] | int) -> str:
        if isinstance(part, int):
            return f"sum of {part} reports of batch {self._batch_id}"
        return f"reports of batch {self._batch_id} on slots {part[0]} to {part[-1]}"
