"""Private keys at rest: AES-256-GCM under a storage key that is kept elsewhere.

A file is ``MAGIC || nonce (12 bytes) || ciphertext and tag``. Each file has a name that says what
it holds, such as "signing key". The file's key is HKDF-SHA256 of the storage key's 32 random bytes,
with this name in ``info``. Because each file has its own key, nonces need to differ only among
versions of one file, and no file opens in place of another file. Without a storage key, files are
in clear, which suits only a demonstration on one machine.
"""

import os
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from riffle.common.process.heads import sync_directory
from riffle.common.protocol.errors import LocalError

MAGIC = b"riffle at rest 1\n"
LABEL = b"riffle v1 at rest\x00"
KEY_BYTES = 32
NONCE_BYTES = 12
OVERHEAD = len(MAGIC) + NONCE_BYTES + 16


class StorageCipher:
    """Encrypts and decrypts files. ``key`` is 32 random bytes, or None to leave files in clear."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key

    def seal(self, data: bytes, name: str) -> bytes:
        """Returns the bytes to store for ``data``. ``name`` says what the data are."""
        if self._key is None:
            return data
        nonce = os.urandom(NONCE_BYTES)
        return MAGIC + nonce + _cipher(self._key, name).encrypt(nonce, data, MAGIC + name.encode())

    def open(self, data: bytes, name: str) -> bytes:
        """Decrypts a file's bytes, which `seal` made with the same ``name``; returns the data.

        Raises LocalError ``invalid-spec`` if the key is wrong or missing. If there is a key, also
        refuses a file in clear: otherwise, anybody without the key could slip in a file.
        """
        if self._key is None:
            if is_sealed(data):
                raise LocalError("invalid-spec", f"the {name} is encrypted: give the storage key")
            return data
        if not is_sealed(data):
            fault = "is not encrypted, but a storage key is given: was the file replaced?"
            raise LocalError("invalid-spec", f"the {name} {fault}")
        nonce, sealed = data[len(MAGIC) :][:NONCE_BYTES], data[len(MAGIC) + NONCE_BYTES :]
        try:
            return _cipher(self._key, name).decrypt(nonce, sealed, MAGIC + name.encode())
        except (InvalidTag, ValueError) as error:
            reason = "the key is another one, or the file is damaged or was made for something else"
            detail = f"the {name} does not open with this storage key: {reason}"
            raise LocalError("invalid-spec", detail) from error


def _cipher(key: bytes, name: str) -> AESGCM:
    derive = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=LABEL + name.encode())
    return AESGCM(derive.derive(key))


def replace_file(file: Path, data: bytes) -> None:
    """Writes a whole file durably, readable by its owner only; on OSError the old file stays."""
    new = file.with_name(file.name + ".new")
    _write(new, data)
    new.replace(file)
    sync_directory(file.parent)


def create_file(file: Path, data: bytes) -> bool:
    """Writes a file as `replace_file` does, and returns True; if the file exists, returns False."""
    # The name of ``new`` is random, so no other replica writes to this file at the same time.
    new = file.with_name(f"{file.name}.{os.urandom(4).hex()}.new")
    _write(new, data)
    try:
        file.hardlink_to(new)
    except FileExistsError:
        return False
    finally:
        new.unlink()
    sync_directory(file.parent)
    return True


def _write(file: Path, data: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def erase_file(file: Path) -> None:
    """Overwrites and removes a file; does nothing if it is gone, as in a retry after a crash.

    Overwriting only helps on a file system that writes in place. Elsewhere, encrypt the medium.
    """
    with suppress(FileNotFoundError):  # another replica may have removed it first
        with file.open("r+b") as stream:
            stream.write(os.urandom(file.stat().st_size))
            stream.flush()
            os.fsync(stream.fileno())
        file.unlink()


def is_sealed(data: bytes) -> bool:
    """Returns whether a file's bytes are encrypted."""
    return data.startswith(MAGIC)
