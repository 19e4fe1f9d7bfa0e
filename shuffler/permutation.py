"""The shuffle: one permutation of all messages of all reports.

The permutation sorts 128-bit numbers from an AES-256-CTR keystream
(`common.mechanism.shuffle_model.permutation`). The keystream's 32-byte key is drawn from the
system's CSPRNG when the batch is deposited.

Reports enter in the order of their slots, whatever their order of arrival. If the shuffler permutes
a batch again after a crash, it gets the same bytes. So it need not store the permuted bytes.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from riffle.common.mechanism.shuffle_model import permutation
from riffle.common.process.tracing import span
from riffle.common.protocol.errors import LocalError

Messages = npt.NDArray[np.uint8]
CHUNK_BYTES = 1 << 20


class Keystream:
    """AES-256-CTR as a source of random bytes. A key has one stream: use each key only once."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def read(self, size: int) -> bytes:
        """Returns the next ``size`` bytes."""
        return self._encryptor.update(bytes(size))


@dataclass(frozen=True, slots=True)
class Release:
    """The bytes for the analyzer, the number of messages in them, and their SHA-256 in hex."""

    parts: tuple[memoryview, ...] = field(repr=False)
    messages: int
    sha256: str

    @classmethod
    def of(cls, messages: Messages, *sums: memoryview) -> "Release":
        """Returns a release: first ``sums``, then ``messages`` (n * L, bytes), already permuted."""
        parts = (*sums, messages.data.cast("B"))
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return cls(parts, len(messages), digest.hexdigest())

    @property
    def size(self) -> int:
        """The size of the release in bytes."""
        return sum(map(len, self.parts))

    def chunks(self) -> Iterable[memoryview]:
        """Yields all bytes in chunks of at most 1 MiB, without a copy."""
        for part in self.parts:
            for start in range(0, len(part), CHUNK_BYTES):
                yield part[start : start + CHUNK_BYTES]


def senders(places: Sequence[int], key: bytes, *, n: int, L: int) -> list[int]:
    """Returns the slots of the reports that held the messages at these places of the hand-over."""
    order = permutation(n * L, Keystream(key))
    return [int(slot) for slot in order[np.array(places)] // L]


@span("permute")
def permute_messages(
    uploads: Iterable[tuple[Sequence[int], bytes]],
    key: bytes,
    *,
    n: int,
    L: int,
    message_bytes: int,
) -> Messages:
    """Returns all messages of n reports, permuted, in shape (n * L, message bytes).

    Each upload has slots and their concatenated reports; the order of uploads does not matter.
    ``key`` has 32 bytes. Raises LocalError if any of the n slots does not have exactly one report.
    """
    places = np.empty((n, L), dtype=np.int64)  # each message's place: the inverse permutation
    places.reshape(-1)[permutation(n * L, Keystream(key))] = np.arange(n * L)
    permuted = np.empty(n * L, dtype=f"V{message_bytes}")
    missing = np.ones(n, dtype=np.bool_)
    for slots, reports in uploads:
        whole = len(reports) == len(slots) * L * message_bytes
        if not whole or max(slots) >= n or not missing[slots].all():
            raise LocalError("internal", "stored reports are damaged; nothing is released")
        np.put(permuted, places[slots], np.frombuffer(reports, dtype=permuted.dtype))
        missing[slots] = False
    if missing.any():
        detail = f"{missing.sum()} of {n} reports are missing; nothing is released"
        raise LocalError("internal", detail)
    return permuted.view(np.uint8).reshape(n * L, message_bytes)


def blank_copies(messages: Messages) -> int:
    """Zeroes every message that is a copy of an earlier one, and returns the number of copies.

    Copies of a user's messages would count the user several times. Two messages count as copies if
    their first 8 bytes, part of a fresh public key, are equal. Among honest messages, this happens
    in about one of 100,000 batches of 1 GiB. A blank message does not open: it counts as failed.
    """
    starts = np.ascontiguousarray(messages[:, :8]).view(np.uint64)[:, 0]
    order = np.argsort(starts, kind="stable")
    copies = order[1:][starts[order[1:]] == starts[order[:-1]]]
    messages[copies] = 0
    return len(copies)
