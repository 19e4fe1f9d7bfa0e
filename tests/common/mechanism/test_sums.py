"""The sums mechanism: the same counts as messages, uniform masks, and no key without a mask."""

import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from riffle.common.mechanism import shuffle_model, sums
from riffle.common.mechanism.counters import CounterLayout, Episode, Sizes
from riffle.common.mechanism.parameters import Noise, Padding
from riffle.common.mechanism.randomness import SeededRandomness, SystemRandomness
from tests.common.mechanism.roles import release

ALPHA = 1e-6  # each statistical test fails by chance once in a million runs
LAYOUT = CounterLayout(Sizes(3, 2, 2), "joint")
NOISE = Noise(20, 1, 4)
INFO = b"riffle v1 mask\x00" + bytes(range(32))
ANALYZER = bytes(range(1, 33))
PUBLIC = X25519PrivateKey.from_private_bytes(ANALYZER).public_key().public_bytes_raw()
VECTOR = "492f1cb85847ffc7bb427865f64c5e8041ec0499b37a1da945a15b4102af027e35190c04fbae5c51"
"""The start of a report, computed by hand with HMAC-SHA256 and AES-128-CTR; it pins the format."""
LOW_ORDER = [
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ec" + "ff" * 30 + "7f"),
]


def fresh() -> bytes:
    return os.urandom(32)


def episode(seed: int) -> Episode:
    draw = np.random.default_rng(seed)
    return Episode(draw.integers(0, 3, 3), draw.integers(0, 2, 2), draw.integers(0, 2, 2))


def vectors(n: int, bits: int = 16) -> list[sums.Words]:
    keys = range(n)
    return [
        sums.encode(LAYOUT, NOISE, bits, episode(i), SeededRandomness.keyed(1, i)) for i in keys
    ]


def opened(reports: list[bytes], private: bytes = ANALYZER, info: bytes = INFO) -> np.ndarray:
    total = sums.empty_sum(LAYOUT.counters, 16)
    keys = sums.add(total, b"".join(reports))
    released = release(total, keys, np.random.default_rng(3).permutation(len(reports)))
    assert len(released) == sums.release_bytes(len(reports), LAYOUT.counters, 16)
    masked, permuted = sums.split_release(released, LAYOUT.counters, 16)
    return masked - sums.add_masks(private, info, permuted, LAYOUT.counters, 16)


def test_the_sum_is_that_of_the_messages_counter_by_counter() -> None:
    padding = Padding(LAYOUT.data_slots, 400)
    reports, messages = [], []
    for i, vector in enumerate(vectors(50)):
        draw = SeededRandomness.keyed(1, i)
        messages.append(shuffle_model.encode(LAYOUT, NOISE, padding, episode(i), draw))
        reports.append(sums.mask(vector, fresh(), PUBLIC, INFO))
        assert len(reports[-1]) == sums.report_bytes(LAYOUT.counters, 16)
    expected = shuffle_model.count(LAYOUT, np.concatenate(messages))
    assert opened(reports).tolist() == expected.tolist()


def test_all_roles_together_give_unbiased_counts() -> None:
    episodes = [episode(0)] * 400 + [None] * 100
    drawn = (sums.encode(LAYOUT, NOISE, 16, each, SystemRandomness()) for each in episodes)
    total = opened([sums.mask(vector, fresh(), PUBLIC, INFO) for vector in drawn])
    counts = shuffle_model.debias(total.astype(np.int64), 500, NOISE)
    true = np.bincount(LAYOUT.encode(episode(0)), minlength=LAYOUT.counters) * 400
    assert np.abs(counts - true).max() < 8 * NOISE.variance(500) ** 0.5


def test_a_masked_vector_is_uniform_whatever_the_data() -> None:
    for value in (0, 1, 65_535):
        vector = np.full(LAYOUT.counters, value, dtype=np.uint16)
        masked = b"".join(sums.mask(vector, fresh(), PUBLIC, INFO)[32:] for _ in range(600))
        for places in (slice(0, None, 2), slice(1, None, 2)):
            observed = np.bincount(np.frombuffer(masked[places], dtype=np.uint8), minlength=256)
            assert stats.chisquare(observed).pvalue > ALPHA


def test_a_report_is_fixed_by_its_key_batch_and_vector() -> None:
    vector, key = np.arange(LAYOUT.counters, dtype=np.uint16), bytes(range(40, 72))
    report = sums.mask(vector, key, PUBLIC, INFO)
    assert report == sums.mask(vector, key, PUBLIC, INFO)  # a retry sends the same bytes
    assert report[:40].hex() == VECTOR
    for other in (
        sums.mask(vector, fresh(), PUBLIC, INFO),
        sums.mask(vector, key, PUBLIC, INFO + b"\x00"),
        sums.mask(vector, key, X25519PrivateKey.generate().public_key().public_bytes_raw(), INFO),
    ):
        words = [np.frombuffer(one[32:], dtype="<u2") for one in (report, other)]
        assert (words[0] == words[1]).mean() < 0.2


def test_a_changed_vector_changes_one_counter_and_a_changed_key_or_batch_all() -> None:
    data = vectors(3)
    reports = [sums.mask(vector, fresh(), PUBLIC, INFO) for vector in data]
    total = np.sum(data, axis=0)
    assert (opened(reports) == total).all()
    assert (opened(reports[::-1]) == total).all()
    changed = bytearray(reports[0])
    changed[32] ^= 1
    assert (opened([bytes(changed), *reports[1:]]) != total).nonzero()[0].tolist() == [0]
    changed = bytearray(reports[0])
    changed[0] ^= 1
    assert (opened([bytes(changed), *reports[1:]]) == total).mean() < 0.2
    assert (opened(reports, info=INFO + b"\x00") == total).mean() < 0.2
    assert (opened(reports, private=fresh()) == total).mean() < 0.2


def test_every_32_bytes_are_a_key_with_a_mask() -> None:
    honest = vectors(1)[0]
    for point in [*LOW_ORDER, b"\xff" * 32, fresh()]:
        zero = point + bytes(2 * LAYOUT.counters)
        known = sums.add_masks(ANALYZER, INFO, point, LAYOUT.counters, 16)
        got = opened([sums.mask(honest, fresh(), PUBLIC, INFO), zero])
        assert (got == honest - known).all()
    for point in LOW_ORDER:  # anybody can compute these masks: their shared secret is zeros
        masks = [sums.add_masks(key, INFO, point, LAYOUT.counters, 16) for key in (fresh(),) * 2]
        assert (masks[0] == masks[1]).all()


@pytest.mark.parametrize("point", LOW_ORDER, ids=bytes.hex)
def test_a_user_masks_nothing_for_an_analyzer_key_that_gives_no_secret(point: bytes) -> None:
    """Anybody, such as the shuffler, could subtract the mask."""
    with pytest.raises(ValueError, match=r"low.order|shared key|zero"):
        sums.mask(vectors(1)[0], fresh(), point, INFO)


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 20), st.integers(1, 32), st.data())
def test_words_are_the_smallest_that_hold_data_and_noise(
    n: int, bits: int, log2: int, data: st.DataObject
) -> None:
    noise = Noise(bits, data.draw(st.integers(1, (1 << log2) - 1)), log2)
    most = n + noise.mean(n) + 12 * noise.variance(n) ** 0.5
    try:
        word = sums.word_bits(n, noise)
    except ValueError:
        assert most > 2**32 * (1 - 1e-9)
        return
    assert most < 2**word * (1 + 1e-9)
    assert word == 16 or most > 2**16 * (1 - 1e-9)


def test_sums_are_taken_modulo_the_word() -> None:
    total = sums.empty_sum(2, 16)
    sums.add(total, (bytes(32) + b"\xff\xff\x01\x00") * 3)
    assert total.tolist() == [65_533, 3]


@pytest.mark.parametrize("size", [31, 33, 63])
def test_sizes_that_do_not_fit_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="whole number"):
        sums.add_masks(ANALYZER, INFO, bytes(size), 4, 16)
    with pytest.raises(ValueError, match="reshape"):
        sums.add(sums.empty_sum(8, 16), bytes(size))
