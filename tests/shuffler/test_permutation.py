"""The shuffle itself: a uniform permutation, the same each time."""

import hashlib
import math
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from riffle.common.mechanism.shuffle_model import permutation
from riffle.common.mechanism.sums import split_release
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import KeyPair
from riffle.shuffler.permutation import (
    CHUNK_BYTES,
    Keystream,
    Messages,
    Release,
    blank_copies,
    permute_messages,
)
from tests.shuffler.conftest import Api
from tests.shuffler.world import user

KEY = bytes(range(32))
Uploads = list[tuple[list[int], bytes]]


def reports(n: int, L: int, size: int) -> tuple[Uploads, list[bytes]]:
    """n reports, the first two in one upload, and their n * L distinct messages."""
    rows = [index.to_bytes(size, "big") for index in range(n * L)]
    each = [b"".join(rows[start : start + L]) for start in range(0, n * L, L)]
    rest = [([slot], each[slot]) for slot in range(2, n)]
    return [([0, 1], each[0] + each[1]), *rest], rows


def rows_of(messages: Messages) -> list[bytes]:
    return [bytes(row) for row in messages]


def test_every_message_leaves_once_and_the_order_is_another() -> None:
    uploads, rows = reports(7, 11, 50)
    permuted = permute_messages(uploads, KEY, n=7, L=11, message_bytes=50)
    assert rows_of(permuted) != rows
    assert sorted(rows_of(permuted)) == sorted(rows)


def test_the_order_of_arrival_does_not_change_the_bytes() -> None:
    uploads, _ = reports(6, 9, 49)
    first, again = (
        permute_messages(each, KEY, n=6, L=9, message_bytes=49) for each in (uploads, uploads[::-1])
    )
    assert rows_of(first) == rows_of(again)


def test_the_order_is_that_of_every_version() -> None:
    """A batch may have been handed over by another version, and must leave as the same bytes."""
    uploads, _ = reports(40, 30, 49)
    permuted = permute_messages(uploads, KEY, n=40, L=30, message_bytes=49)
    assert (
        hashlib.sha256(permuted.data).hexdigest()
        == "bb6706dae5a0944d097c70de6d0f2b4783a94bd3b1a6ca40f539fc57e1996328"
    )


def test_another_key_gives_another_order() -> None:
    uploads, _ = reports(5, 20, 49)
    first, second = (
        permute_messages(uploads, key, n=5, L=20, message_bytes=49) for key in (KEY, bytes(32))
    )
    assert rows_of(first) != rows_of(second)  # equal with probability 1 / 100!


@pytest.mark.parametrize("kind", ["messages", "sums", "local", "central"])
def test_the_order_follows_from_nothing_that_others_know(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shufflers with the same keys, batch, slots and messages permute differently."""
    pair, n = KeyPair.generate(), 4 if kind == "messages" else 20
    monkeypatch.setattr("riffle.shuffler.store.vault.KeyPair.generate", lambda: pair)
    sent: list[bytes] = []
    orders = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        with ExitStack() as stack:
            api = Api(tmp_path / name, stack, aggregation=kind)
            api.restart(trust_models=("shuffle", "local", "central"), max_epsilon=100.0)
            batch = api.deposit(n)
            assert batch.batch_key == pair.public
            sent = sent or [batch.messages() for _ in range(n)]
            leases = [lease.lease for lease in api.leases(batch, [user(i) for i in range(n)])]
            api.outcomes(batch, list(zip(leases, map(batch.report, sent), strict=True)))
            released = api.messages(batch).content
            if bits := batch.context.descriptor.word_bits:
                _, keys = split_release(released, batch.context.descriptor.layout.counters, bits)
                orders.append([bytes(keys[i : i + 32]) for i in range(0, len(keys), 32)])
            else:
                orders.append(batch.rows(released))
    arrived = [report[: len(orders[0][0])] for report in sent] if kind != "messages" else []
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1] and arrived not in orders


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


@pytest.mark.parametrize("fault", ["missing", "one too many", "twice", "beyond n", "cut"])
def test_nothing_is_released_of_a_damaged_batch(fault: str) -> None:
    uploads, _ = reports(4, 4, 49)
    slots, report = uploads[-1]
    uploads[-1] = {
        "missing": (slots, b""),
        "one too many": (slots, report * 2),
        "twice": ([0], report),
        "beyond n": ([4], report),
        "cut": (slots, report[:-1]),
    }[fault]
    with pytest.raises(LocalError, match="nothing is released"):
        permute_messages(uploads, KEY, n=4, L=4, message_bytes=49)


def test_nothing_is_released_of_a_batch_that_lacks_an_upload() -> None:
    uploads, _ = reports(4, 4, 49)
    with pytest.raises(LocalError, match="1 of 4 reports are missing"):
        permute_messages(uploads[:-1], KEY, n=4, L=4, message_bytes=49)


def test_large_releases_leave_in_chunks() -> None:
    messages = np.zeros((3, CHUNK_BYTES), dtype=np.uint8)
    sizes = [len(chunk) for chunk in Release.of(messages[:, : CHUNK_BYTES // 2].copy()).chunks()]
    assert sizes == [CHUNK_BYTES, CHUNK_BYTES // 2]


def test_only_copies_are_blanked() -> None:
    rows = np.random.default_rng(1).integers(0, 256, (500, 50), dtype=np.uint8)
    kept = rows.copy()
    assert blank_copies(rows) == 0
    assert (rows == kept).all()
    rows[[7, 90, 400]] = rows[3]
    assert blank_copies(rows) == 3
    assert not rows[[7, 90, 400]].any()
    rows[[7, 90, 400]] = kept[[7, 90, 400]]
    assert (rows == kept).all()
