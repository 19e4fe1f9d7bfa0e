"""What erasure destroys: one small file a batch, outside the database.

A batch's secret is the private half of its outer key pair and the key of its permutation. Pages
and logs of a database keep what was deleted from it; once this file is gone, what they keep of the
batch's reports is ciphertext without a key, and the permutation that was used cannot be recomputed.

Overwriting before unlinking helps where a file system writes in place. Where it does not (copy on
write, flash), the medium itself should be encrypted; `docs` say so to the operator.

Reports as they lie in the store: out of their outer seals, under a key of their batch's secret.

A report's outer seal is opened once, when it comes, so that none is kept that does not open. The
reports kept of an upload are then encrypted together, AES-256-GCM, under a key that follows from
the batch's secret. So erasing the secret leaves what a database's pages and logs hold as unreadable
as the outer seals would be, and the hand-over has no elliptic-curve work left.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import OVERHEAD as SEAL_OVERHEAD
from riffle.common.protocol.hpke import KeyPair, OpenError, open_sealed
from riffle.common.server.at_rest import (
    OVERHEAD,
    FileCipher,
    create_file,
    erase_file,
    is_sealed,
    sync_directory,
)

MAGIC = b"riffle secret 1\n"
KEY_BYTES = 32
SECRET_BYTES = len(MAGIC) + 2 * KEY_BYTES


@dataclass(frozen=True, slots=True)
class BatchSecret:
    """Outer key pair of a batch and the 32-byte key of its permutation."""

    outer: KeyPair
    permutation: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> "BatchSecret":
        """A fresh secret from the system's CSPRNG."""
        return cls(KeyPair.generate(), os.urandom(KEY_BYTES))


class SecretLostError(LocalError):
    """The secret of a batch is gone for good: missing from a vault that is there, or damaged."""

    def __init__(self, batch_id: str, what: str) -> None:
        super().__init__(
            "internal", f"the secret of batch {batch_id} is {what}; its reports open no more"
        )


class Vault:
    """The directory of batch secrets, which all replicas share.

    Writes are synced, file and directory, before they return.
    """

    def __init__(self, directory: Path, cipher: FileCipher) -> None:
        self._directory = directory
        self._cipher = cipher
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError("unavailable", f"cannot make {directory}: {error}") from error

    def put(self, batch_id: str, secret: BatchSecret) -> BatchSecret:
        """Keep a secret, unless the batch has one: that is left as it is. Returns what is kept.

        So a replica that comes late, its transaction lost, cannot replace a secret in use; and the
        one that a crash left before its batch was known to anyone is used after it.

        Raises:
            SecretLostError: the one that is there is damaged.
            LocalError: ``unavailable``, when it cannot be written.
        """
        data = MAGIC + secret.outer.private + secret.permutation
        try:
            kept = create_file(self._path(batch_id), self._cipher.seal(data, _name(batch_id)))
        except OSError as error:
            raise LocalError("unavailable", f"cannot write a batch secret: {error}") from error
        return secret if kept else self.get(batch_id)

    def identity(self) -> int:
        """The number of this vault, drawn when it is first asked for.

        Raises:
            LocalError: ``unavailable``: it cannot be read or written.
        """
        path = self._directory.with_suffix(".id")
        try:
            if not path.exists():
                create_file(path, str(int.from_bytes(os.urandom(7), "big")).encode())
            return int(path.read_text())
        except (OSError, ValueError) as error:
            raise LocalError("unavailable", f"cannot use {path}: {error}") from error

    def get(self, batch_id: str) -> BatchSecret:
        """The secret of a batch.

        Raises:
            SecretLostError: it is missing or damaged.
            LocalError: ``unavailable``: it cannot be read now, or does not open with this storage
                key, which says nothing about later.
        """
        try:
            data = self._path(batch_id).read_bytes()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._directory.is_dir():
                raise SecretLostError(batch_id, "missing") from error
            raise LocalError("unavailable", f"cannot read a batch secret: {error}") from error
        if len(data) not in (SECRET_BYTES, SECRET_BYTES + OVERHEAD):
            raise SecretLostError(batch_id, "damaged")
        try:
            data = self._cipher.open(data, _name(batch_id))
        except LocalError as error:
            # Perhaps the storage key is wrong: that is mended, so it must not cost the batch.
            raise LocalError("unavailable", error.detail) from error
        keys = data.removeprefix(MAGIC)
        if not data.startswith(MAGIC) or len(data) != SECRET_BYTES:
            raise SecretLostError(batch_id, "damaged")
        return BatchSecret(KeyPair.from_private(keys[:KEY_BYTES]), keys[KEY_BYTES:])

    def destroy(self, batch_id: str) -> None:
        """Overwrite and remove a secret. Nothing happens if it is gone: a retry after a crash."""
        for file in self._directory.glob(f"{batch_id}.*"):
            erase_file(file)
        sync_directory(self._directory)

    def probe(self) -> None:
        """Raise LocalError ``unavailable`` unless secrets can be written and read here."""
        if not os.access(self._directory, os.R_OK | os.W_OK | os.X_OK):
            raise LocalError("unavailable", f"{self._directory} cannot be written")

    def _path(self, batch_id: str) -> Path:
        return self._directory / f"{batch_id}.secret"


def _name(batch_id: str) -> str:
    return f"secret of batch {batch_id}"


LABEL_STORED = b"riffle v1 stored reports\x00"


class Stored:
    """Encrypts and decrypts what the store keeps of one batch's reports.

    Its key is HKDF-SHA256 of the whole secret under a label of its own, so that it says nothing of
    the keys that open outer seals and draw the permutation, nor they of it.
    """

    def __init__(self, batch_id: str, secret: BatchSecret) -> None:
        derive = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=LABEL_STORED)
        self._cipher = FileCipher(derive.derive(secret.outer.private + secret.permutation))
        self._batch_id = batch_id
        self._outer = secret.outer.private

    def encrypt(self, slots: Sequence[int], reports: bytes) -> bytes:
        """What to store for the reports on these slots, end to end."""
        return self._cipher.seal(reports, self._name(slots))

    def decrypt(self, slots: Sequence[int], kept: bytes, info: bytes) -> bytes:
        """The reports; one that a version before `stored` keeps is under its outer seal.

        Raises:
            LocalError: they are damaged, or not of these slots.
        """
        try:
            if not is_sealed(kept) and len(slots) == 1 and len(kept) > SEAL_OVERHEAD:
                return open_sealed(self._outer, info, kept)
            return self._cipher.open(kept, self._name(slots))
        except (LocalError, OpenError) as error:
            detail = "stored reports, or their secret, are damaged; none is released"
            raise LocalError("internal", detail) from error

    def _name(self, slots: Sequence[int]) -> str:
        return f"reports of batch {self._batch_id} on slots {slots[0]} to {slots[-1]}"
