"""The shuffle itself: outer seals off, then a uniform permutation, the same each time."""

import math
import os
from collections import Counter

import numpy as np
import pytest

from common import hpke
from common.errors import LocalError
from common.mechanism import permutation
from shuffler.permute import CHUNK_BYTES, Keystream, Release, shuffle
from shuffler.vault import BatchSecret

INFO = b"a context"


Uploads = list[tuple[list[int], bytes]]


def reports(secret: BatchSecret, n: int, L: int, size: int) -> tuple[Uploads, list[bytes]]:
    """n sealed reports, the first two in one upload, and their n * L distinct messages."""
    rows = [index.to_bytes(size, "big") for index in range(n * L)]
    sealed = [
        hpke.seal(secret.outer.public, INFO, b"".join(rows[start : start + L]))
        for start in range(0, n * L, L)
    ]
    rest = [([slot], sealed[slot]) for slot in range(2, n)]
    return [([0, 1], sealed[0] + sealed[1]), *rest], rows


def released(release: Release) -> list[bytes]:
    return [bytes(row) for row in release.messages]


def test_every_message_leaves_once_and_the_order_is_another() -> None:
    secret = BatchSecret.generate()
    sealed, rows = reports(secret, 7, 11, 50)
    release = shuffle(sealed, secret, INFO, n=7, L=11, message_bytes=50)
    assert released(release) != rows
    assert sorted(released(release)) == sorted(rows)
    assert b"".join(release.chunks()) == release.messages.tobytes()


def test_the_same_secret_and_reports_give_the_same_bytes() -> None:
    secret = BatchSecret.generate()
    sealed, _ = reports(secret, 5, 9, 49)
    first, again = (shuffle(sealed, secret, INFO, n=5, L=9, message_bytes=49) for _ in range(2))
    assert first.sha256 == again.sha256
    assert released(first) == released(again)


def test_the_order_of_uploads_does_not_show() -> None:
    secret = BatchSecret.generate()
    sealed, _ = reports(secret, 6, 9, 49)
    first, again = (
        shuffle(each, secret, INFO, n=6, L=9, message_bytes=49) for each in (sealed, sealed[::-1])
    )
    assert released(first) == released(again)


def test_another_key_gives_another_order() -> None:
    secret = BatchSecret.generate()
    other = BatchSecret(secret.outer, os.urandom(32))
    sealed, _ = reports(secret, 5, 20, 49)
    first = shuffle(sealed, secret, INFO, n=5, L=20, message_bytes=49)
    second = shuffle(sealed, other, INFO, n=5, L=20, message_bytes=49)
    assert released(first) != released(second)  # equal with probability 1 / 100!


def test_permutations_of_four_are_uniform() -> None:
    """Chi-square over the 24 orders, 4,800 fixed keys: a fair coin fails this once in 10^6."""
    draws = 4_800
    counts = Counter(
        tuple(permutation(4, Keystream(i.to_bytes(32, "big"))).tolist()) for i in range(draws)
    )
    expected = draws / 24
    statistic = sum((count - expected) ** 2 for count in counts.values()) / expected
    statistic += (24 - len(counts)) * expected
    degrees, z = 23, 4.75  # Wilson-Hilferty: z of 1 - 1e-6
    limit = degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit


def test_the_keystream_is_aes_256_in_counter_mode() -> None:
    """First block of AES-256 under the zero key: the known answer of the zero block."""
    assert Keystream(bytes(32)).read(16).hex() == "dc95c078a2408989ad48a21492842087"
    stream = Keystream(bytes(range(32)))
    assert stream.read(10) + stream.read(54) == Keystream(bytes(range(32))).read(64)


FAULTS = (
    "missing",
    "one too many",
    "twice",
    "beyond n",
    "tampered",
    "wrong context",
    "short",
    "cut",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_released_of_a_damaged_batch(fault: str) -> None:
    secret = BatchSecret.generate()
    uploads, _ = reports(secret, 4, 4, 49)
    slots, sealed = uploads[-1]
    uploads[-1] = {
        "missing": ([3], b""),
        "one too many": ([3], sealed * 2),
        "twice": ([0], sealed),
        "beyond n": ([4], sealed),
        "tampered": (slots, sealed[:-1] + bytes([sealed[-1] ^ 1])),
        "wrong context": (slots, hpke.seal(secret.outer.public, b"another", bytes(4 * 49))),
        "short": (slots, hpke.seal(secret.outer.public, INFO, bytes(4 * 49 - 1))),
        "cut": (slots, sealed[:-1]),
    }[fault]
    with pytest.raises(LocalError, match="nothing is released"):
        shuffle(uploads, secret, INFO, n=4, L=4, message_bytes=49)


def test_nothing_is_released_of_a_batch_with_an_upload_less() -> None:
    secret = BatchSecret.generate()
    uploads, _ = reports(secret, 4, 4, 49)
    with pytest.raises(LocalError, match="1 of 4 reports are missing"):
        shuffle(uploads[:-1], secret, INFO, n=4, L=4, message_bytes=49)


def test_large_releases_leave_in_pieces() -> None:
    messages = np.zeros((3, CHUNK_BYTES), dtype=np.uint8)
    sizes = [len(chunk) for chunk in Release(messages[:, : CHUNK_BYTES // 2].copy(), "").chunks()]
    assert sizes == [CHUNK_BYTES, CHUNK_BYTES // 2]
