"""Reports as they lie in the store: they open with their batch's secret, on their slots."""

import pytest

from riffle.common.protocol import hpke
from riffle.common.protocol.errors import LocalError
from riffle.shuffler.store.vault import BatchSecret, Stored

BATCH, SLOTS, REPORTS, INFO = "ab" * 16, [3, 4, 7], b"three reports" * 3, b"a context"
SECRET = BatchSecret.generate()


def test_what_is_stored_is_read_again_and_hides_the_reports() -> None:
    first, second = (Stored(BATCH, SECRET).encrypt(SLOTS, REPORTS) for _ in range(2))
    assert Stored(BATCH, SECRET).decrypt(SLOTS, first, INFO) == REPORTS
    assert REPORTS[:8] not in first
    assert first != second, "a nonce is never used again"


@pytest.mark.parametrize("fault", ["bit", "cut", "slots", "batch", "outer", "permutation", "none"])
def test_what_is_damaged_or_of_another_place_is_not_released(fault: str) -> None:
    """Both halves of the secret are needed: with either one erased nothing can be read."""
    kept, other = Stored(BATCH, SECRET).encrypt(SLOTS, REPORTS), BatchSecret.generate()
    secret = {
        "outer": BatchSecret(other.outer, SECRET.permutation),
        "permutation": BatchSecret(SECRET.outer, other.permutation),
    }.get(fault, SECRET)
    changed = {"bit": kept[:-1] + bytes([kept[-1] ^ 1]), "cut": kept[:-1], "none": b""}
    batch = "cd" * 16 if fault == "batch" else BATCH
    slots = [3, 4, 8] if fault == "slots" else SLOTS
    with pytest.raises(LocalError, match="none is released"):
        Stored(batch, secret).decrypt(slots, changed.get(fault, kept), INFO)


def test_a_report_stored_by_an_earlier_version_is_under_its_outer_seal() -> None:
    kept = hpke.seal(SECRET.outer.public, INFO, b"a report")
    assert Stored(BATCH, SECRET).decrypt([5], kept, INFO) == b"a report"
    with pytest.raises(LocalError, match="none is released"):
        Stored(BATCH, SECRET).decrypt([5], kept, b"another context")
