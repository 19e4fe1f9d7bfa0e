"""The local mechanism: exact flips, fixed length, strict counting, unbiased counts."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from riffle.common.mechanism.counters import CounterLayout, Episode, Families, Sizes
from riffle.common.mechanism.local_model import count, debias, encode, report_bytes
from riffle.common.mechanism.parameters import Flips
from riffle.common.mechanism.randomness import SeededRandomness, SystemRandomness
from tests.common.mechanism.roles import local_counts

ALPHA = 1e-6  # each statistical test fails by chance once in a million runs
SYSTEM = SystemRandomness()
LAYOUT = CounterLayout(Sizes(3, 1, 2), "lean")  # 18 + 6 counters: three bytes
ODD = CounterLayout(Sizes(2, 2, 2), "lean")  # 16 + 8, and one layer has 8
FLIPS = Flips(1 << 30)


def episode() -> Episode:
    return Episode(np.array([0, 1, 0]), np.array([0, 0]), np.array([0, 1]))


@dataclass
class Script:
    """Bytes written down beforehand."""

    data: bytes

    def read(self, size: int) -> bytes:
        head, self.data = self.data[:size], self.data[size:]
        assert len(head) == size
        return head


def bits_of(report: np.ndarray, counters: int) -> list[int]:
    result: list[int] = np.unpackbits(report.astype(np.uint8))[:counters].tolist()
    return result


def test_a_bit_flips_exactly_when_its_word_is_below_the_numerator() -> None:
    words = np.full(24, FLIPS.numerator, dtype="<u4")
    words[[0, 5]] = FLIPS.numerator - 1
    report = encode(LAYOUT, FLIPS, None, Script(words.tobytes()))  # type: ignore[arg-type]
    assert [i for i, bit in enumerate(bits_of(report, 24)) if bit] == [0, 5]
    report = encode(LAYOUT, FLIPS, episode(), Script(words.tobytes()))  # type: ignore[arg-type]
    assert set(np.flatnonzero(bits_of(report, 24))) == set(LAYOUT.encode(episode())) ^ {0, 5}


@pytest.mark.parametrize("families", ["paper", "lean", "joint"])
def test_length_is_the_same_for_every_episode_and_for_none(families: Families) -> None:
    layout = CounterLayout(Sizes(2, 2, 2), families)
    reports = [encode(layout, FLIPS, one, SYSTEM) for one in (episode(), None)]
    assert {report.size for report in reports} == {report_bytes(layout.counters)}
    assert all(report.min() >= 0 and report.max() <= 255 for report in reports)


def test_flips_have_their_probability_and_are_independent() -> None:
    """Counts of flips a report are Binomial(C, f): chi-square, 20,000 reports."""
    reports = np.stack([encode(LAYOUT, Flips(3 << 28), None, SYSTEM) for _ in range(20_000)])
    flips = np.unpackbits(reports.astype(np.uint8), axis=1).sum(axis=1)
    law = stats.binom(24, 3 / 16)
    observed = np.bincount(np.minimum(flips, 12), minlength=13)
    expected = 20_000 * np.append(law.pmf(np.arange(12)), law.sf(11))
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > ALPHA


@given(st.lists(st.lists(st.booleans(), min_size=24, max_size=24), max_size=5))
def test_count_adds_bits(rows: list[list[bool]]) -> None:
    reports = np.packbits(np.array(rows, dtype=bool).reshape(-1, 24), axis=1)
    histogram, failed = count(LAYOUT, reports)
    assert failed.tolist() == []
    assert histogram.tolist() == [*np.array(rows, dtype=int).reshape(-1, 24).sum(axis=0), len(rows)]


def test_a_bit_past_the_last_counter_spoils_its_report_alone() -> None:
    layout = CounterLayout(Sizes(3, 1, 1), "lean")  # 9 + 3 counters in 16 bits
    good, bad = np.array([0xFF, 0xF0]), np.array([0xFF, 0xF1])
    histogram, failed = count(layout, np.stack([good, bad, good]))
    assert (histogram.tolist(), failed.tolist()) == ([2] * 12 + [2], [1])
    assert count(layout, np.empty((0, 2), dtype=np.int64))[0].tolist() == [0] * 13


def test_counts_are_unbiased_with_the_stated_variance() -> None:
    """3,000 users, 18 + 6 counters: sum of squared standard scores is chi-square, 24 degrees."""
    n, flips = 3_000, Flips(round(0.4 * 2**32))
    result = local_counts(ODD, flips, [episode() if i % 3 else None for i in range(n)], SYSTEM)
    true = np.zeros(ODD.counters)
    true[ODD.encode(episode())] = n - n // 3
    scores = (result - true) ** 2 / flips.variance(n)
    assert stats.chi2.cdf(scores.sum(), ODD.counters) == pytest.approx(0.5, abs=0.5 - ALPHA)


def test_debiasing_is_exact_where_flips_are_as_expected() -> None:
    flips = Flips(1 << 30)  # f = 1/4
    assert debias(np.array([25, 75, 50]), 100, flips).tolist() == [0.0, 100.0, 50.0]


def test_seeded_reports_repeat() -> None:
    first, second = (
        encode(LAYOUT, FLIPS, episode(), SeededRandomness.keyed(1, "a")) for _ in range(2)
    )
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize("numerator", [0, -1, 1 << 31])
def test_impossible_flips_are_refused(numerator: int) -> None:
    with pytest.raises(ValueError, match="between 0 and 1/2"):
        Flips(numerator)
