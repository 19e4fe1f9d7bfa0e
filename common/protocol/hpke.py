"""HPKE (RFC 9180, Base mode) with X25519, HKDF-SHA256 and AES-128-GCM, for many messages at once.

A sealed message is enc (the sender's fresh public key, 32 bytes) || ciphertext (w bytes) || tag (16
bytes): w + 48 bytes. ``info`` binds a message to one protocol step and one descriptor, so a message
of one batch does not open in another batch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

KEY_BYTES, TAG_BYTES = 32, 16
OVERHEAD = KEY_BYTES + TAG_BYTES
LABEL_MESSAGE = b"riffle v1 message\x00"
LABEL_REPORT = b"riffle v1 report\x00"

_SUITE = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_128_GCM)


class OpenError(ValueError):
    """Raised if a ciphertext does not open under the given key and ``info``."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """An X25519 key pair as raw 32-byte strings. The repr hides the private key."""

    private: bytes = field(repr=False)
    public: bytes

    @classmethod
    def generate(cls) -> "KeyPair":
        """Returns a new pair from the system's CSPRNG."""
        return cls.from_private(X25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def from_private(cls, private: bytes) -> "KeyPair":
        """Returns the key pair that a raw private key determines."""
        key = X25519PrivateKey.from_private_bytes(private)
        return cls(private=private, public=key.public_key().public_bytes_raw())


def seal(public_key: bytes, info: bytes, plaintext: bytes) -> bytes:
    """Seals one plaintext; returns len(plaintext) + 48 bytes."""
    return _SUITE.encrypt(plaintext, X25519PublicKey.from_public_bytes(public_key), info)


def open_sealed(private_key: bytes, info: bytes, ciphertext: bytes) -> bytes:
    """Opens a ciphertext; raises OpenError if it was altered, or sealed for another key or info."""
    try:
        return _SUITE.decrypt(ciphertext, X25519PrivateKey.from_private_bytes(private_key), info)
    except (InvalidTag, ValueError) as error:
        raise OpenError("the ciphertext does not open under this key and context") from error


def open_each(
    private_key: bytes, info: bytes, ciphertexts: Iterable[bytes | memoryview]
) -> Iterator[bytes | None]:
    """Yields each ciphertext's plaintext, or None if the ciphertext does not open."""
    key = X25519PrivateKey.from_private_bytes(private_key)
    for ciphertext in ciphertexts:
        try:
            yield _SUITE.decrypt(ciphertext, key, info)
        except (InvalidTag, ValueError):
            yield None


def seal_indices(
    public_key: bytes,
    info: bytes,
    indices: npt.NDArray[np.integer],
    width: int,
    per_message: int = 1,
) -> bytes:
    """Seals indices (N * per_message,), each as ``width`` big-endian bytes.

    Returns N concatenated messages of 48 + per_message * width bytes each.
    """
    key = X25519PublicKey.from_public_bytes(public_key)
    encrypt, size = _SUITE.encrypt, width * per_message
    words = indices.astype(">u8").view(np.uint8).reshape(-1, 8)
    plain = words[:, 8 - width :].tobytes()
    return b"".join(encrypt(plain[i : i + size], key, info) for i in range(0, len(plain), size))


def open_histogram(
    private_key: bytes, info: bytes, sealed: bytes | memoryview, width: int, counters: int
) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Opens N concatenated messages; raises ValueError if the last one is not whole.

    Returns a histogram (counters + 1,): the number of messages of each index, dummies last. Also
    returns the positions of messages that did not open, or whose index is above ``counters``.
    """
    size = OVERHEAD + width
    if len(sealed) % size:
        raise ValueError(f"{len(sealed)} bytes are not a whole number of {size}-byte messages")
    histogram = [0] * (counters + 1)
    failed = []
    messages = (sealed[start : start + size] for start in range(0, len(sealed), size))
    for position, plaintext in enumerate(open_each(private_key, info, messages)):
        index = counters + 1 if plaintext is None else int.from_bytes(plaintext, "big")
        if index <= counters:
            histogram[index] += 1
        else:
            failed.append(position)
    return np.array(histogram, dtype=np.int64), failed
