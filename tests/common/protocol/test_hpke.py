"""Seals: sizes, contexts, and faults that must not open."""

import numpy as np
import pytest

from riffle.common.protocol.hpke import (
    LABEL_MESSAGE,
    LABEL_REPORT,
    OVERHEAD,
    KeyPair,
    OpenError,
    open_histogram,
    open_sealed,
    seal,
    seal_indices,
)

KEY = KeyPair.generate()
INFO = LABEL_MESSAGE + bytes(32)


def test_a_message_opens_under_its_key_and_context_only() -> None:
    sealed = seal(KEY.public, INFO, b"\x01\x02")
    assert len(sealed) == OVERHEAD + 2
    assert open_sealed(KEY.private, INFO, sealed) == b"\x01\x02"


@pytest.mark.parametrize(
    "fault", ["enc", "ciphertext", "tag", "short", "empty", "key", "digest", "label"]
)
def test_a_ciphertext_with_one_fault_does_not_open(fault: str) -> None:
    sealed = bytearray(seal(KEY.public, INFO, b"\x01\x02"))
    key, info = KEY.private, INFO
    match fault:
        case "enc":
            sealed[0] ^= 1
        case "ciphertext":
            sealed[33] ^= 1
        case "tag":
            sealed[-1] ^= 1
        case "short":
            del sealed[-1]
        case "empty":
            sealed.clear()
        case "key":
            key = KeyPair.generate().private
        case "digest":
            info = LABEL_MESSAGE + bytes(31) + b"\x01"
        case "label":
            info = LABEL_REPORT + bytes(32)
    with pytest.raises(OpenError):
        open_sealed(key, info, bytes(sealed))


def test_histogram_counts_every_message_once_or_as_failed() -> None:
    indices = np.array([0, 5, 5, 9, 10, 3])
    sealed = bytearray(seal_indices(KEY.public, INFO, indices, 2))
    sealed[5 * 50 + 40] ^= 1
    histogram, failed = open_histogram(KEY.private, INFO, bytes(sealed), 2, counters=9)
    assert histogram.tolist() == [1, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert failed == [4, 5]  # index 10, which is neither counter nor dummy, and the changed one
    assert histogram.sum() + len(failed) == indices.size


def test_a_torn_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        open_histogram(KEY.private, INFO, bytes(51), 2, counters=9)


def test_private_keys_stay_out_of_reprs() -> None:
    assert KEY.private.hex() not in repr(KEY)
    assert repr(KEY.private) not in repr(KEY)
    assert KeyPair.from_private(KEY.private) == KEY
