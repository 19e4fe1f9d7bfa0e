"""The shuffle: outer seals off, then one permutation over all messages of all reports.

The permutation sorts 128-bit keys from an AES-256-CTR keystream whose 32-byte key came from the
system's CSPRNG when the batch was made, so it is uniform up to the cipher's and a tie's advantage
(`common.mechanism.permutation`). Reports enter in the order of their slots, so the same secret and
the same reports give the same bytes after a crash, and permuted bytes need never be stored. No
order in which reports arrived enters anywhere.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from common.errors import LocalError
from common.hpke import open_each
from common.mechanism import permutation
from common.tracing import traced
from shuffler.vault import BatchSecret

CHUNK_BYTES = 1 << 20


class Keystream:
    """AES-256-CTR as a source of random bytes. One key makes one stream; never reuse a key."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        return self._encryptor.update(bytes(size))


@dataclass(frozen=True, slots=True)
class Release:
    """What the analyzer gets: sealed messages (n * L, message bytes), and their SHA-256 in hex."""

    messages: npt.NDArray[np.uint8] = field(repr=False)
    sha256: str

    def chunks(self) -> Iterable[memoryview]:
        """All bytes, in pieces of 1 MiB; none is copied."""
        view = self.messages.data.cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


@traced("permute")
def shuffle(
    sealed: Iterable[bytes], secret: BatchSecret, info: bytes, *, n: int, L: int, message_bytes: int
) -> Release:
    """Open n sealed reports, given in the order of their slots, and permute their n * L messages.

    Raises:
        LocalError: a report does not open or there are not exactly n. Neither can happen to a
            sealed batch unless its store was damaged; nothing is released then.
    """
    opened = np.empty((n, L * message_bytes), dtype=np.uint8)
    found = 0
    for plaintext in open_each(secret.outer.private, info, sealed):
        if plaintext is None or found == n or len(plaintext) != opened.shape[1]:
            raise LocalError("internal", "a stored report is damaged; nothing is released")
        opened[found] = np.frombuffer(plaintext, dtype=np.uint8)
        found += 1
    if found != n:
        raise LocalError("internal", f"{found} of {n} reports are stored; nothing is released")
    messages = opened.reshape(n * L, message_bytes)
    order = permutation(n * L, Keystream(secret.permutation))
    permuted = messages.take(order, 0)
    return Release(permuted, hashlib.sha256(permuted.data).hexdigest())
