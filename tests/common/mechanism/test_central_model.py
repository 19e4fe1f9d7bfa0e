"""The central mechanism: exact draws, noise on every counter, nothing else of the counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from riffle.common.mechanism.central_model import (
    BYTES_AT_ONCE,
    add_noise,
    count,
    draw_noise,
    encode,
)
from riffle.common.mechanism.counters import CounterLayout, Episode, Sizes
from riffle.common.mechanism.parameters import CentralNoise, FairBits, Laplace
from riffle.common.mechanism.randomness import SystemRandomness
from tests.common.mechanism.roles import central_counts
from tests.common.mechanism.test_local_model import Script

ALPHA = 1e-6  # each statistical test fails by chance once in a million runs
SYSTEM = SystemRandomness()
LAYOUT = CounterLayout(Sizes(2, 2, 2), "lean")  # 16 + 8 counters, four cells


def episode() -> Episode:
    return Episode(np.array([0, 1, 0]), np.array([1, 0]), np.array([0, 1]))


def scripted(noise: CentralNoise, counters: int, data: bytes) -> list[int]:
    result: list[int] = draw_noise(noise, counters, Script(data)).tolist()  # type: ignore[arg-type]
    return result


def test_laplace_noise_counts_words_below_the_numerator_on_either_side() -> None:
    """Up: two words below, then one that is not; down: none. And the other way round."""
    noise = Laplace(1000)
    below, not_below = (999).to_bytes(4, "little"), (1000).to_bytes(4, "little")
    assert scripted(noise, 1, below + below + not_below + not_below) == [2]
    assert scripted(noise, 1, not_below + below + not_below) == [-1]


@given(st.integers(1, 300), st.data())
def test_binomial_noise_counts_the_ones_of_exactly_so_many_bits(
    bits: int, data: st.DataObject
) -> None:
    block = data.draw(st.binary(min_size=-(-bits // 8), max_size=-(-bits // 8)))
    ones = np.unpackbits(np.frombuffer(block, np.uint8), bitorder="little")[:bits].sum()
    assert scripted(FairBits(bits), 1, block) == [ones]


@pytest.mark.parametrize("numerator", [1 << 30, 3_650_000_000])
def test_laplace_noise_has_its_law(numerator: int) -> None:
    """Chi-square against (1 - q) / (1 + q) q^|z|, 50,000 draws, tails beyond 15 together."""
    noise, n = Laplace(numerator), 50_000
    z = np.clip(draw_noise(noise, n, SYSTEM), -15, 15)
    support, q = np.arange(-15, 16), noise.q
    mass = (1 - q) / (1 + q) * q ** np.abs(support)
    mass[[0, -1]] = q**15 / (1 + q)
    keep = n * mass > 5
    observed = np.bincount(z + 15, minlength=31)[keep]
    assert stats.chisquare(observed, n * mass[keep], sum_check=False).pvalue > ALPHA


def test_binomial_noise_has_its_law() -> None:
    noise, n = FairBits(57), 20_000
    ones = draw_noise(noise, n, SYSTEM)
    values = np.arange(18, 40)
    observed = [(ones == value).sum() for value in values]
    expected = n * stats.binom(57, 0.5).pmf(values)
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > ALPHA


def test_binomial_noise_of_more_bits_than_are_read_at_once() -> None:
    bits = 8 * BYTES_AT_ONCE + 3
    (ones,) = draw_noise(FairBits(bits), 1, SYSTEM)
    assert stats.binomtest(int(ones), bits, 0.5).pvalue > ALPHA


def test_a_report_is_its_indices_and_dummies() -> None:
    report = encode(LAYOUT, episode())
    assert report.size == encode(LAYOUT, None).size == LAYOUT.data_slots == 4
    assert sorted(report) == sorted([*LAYOUT.encode(episode()), LAYOUT.dummy])
    assert encode(LAYOUT, None).tolist() == [LAYOUT.dummy] * 4


def test_count_drops_dummies_and_says_how_many_reports() -> None:
    reports = np.stack([encode(LAYOUT, episode()), encode(LAYOUT, None), np.full(4, 25)])
    histogram, failed = count(LAYOUT, reports)
    assert failed.tolist() == [2]
    assert histogram[-1] == 2, "reports, not dummies: their number would tell the rewards' sum"
    assert np.flatnonzero(histogram[:-1]).tolist() == sorted(LAYOUT.encode(episode()))


@pytest.mark.parametrize("noise", [Laplace(3_900_000_000), FairBits(200)])
def test_every_counter_gets_noise_and_the_number_of_reports_none(noise: CentralNoise) -> None:
    raw = np.arange(25)
    drawn = np.array([add_noise(raw, noise, SYSTEM) - raw for _ in range(40)])
    assert (drawn[:, :-1].var(axis=0) > 0).all()
    assert not drawn[:, -1].any()
    assert raw.tolist() == list(range(25)), "what is given is not changed"


@pytest.mark.parametrize("noise", [Laplace(3_900_000_000), FairBits(200)])
def test_counts_are_unbiased_with_the_stated_variance(noise: CentralNoise) -> None:
    """1,000 runs of 24 counters; kurtosis is at most 6 or so: the variance is within 5 errors."""
    runs = np.stack([central_counts(LAYOUT, noise, [episode()] * 3, SYSTEM) for _ in range(1_000)])
    true = np.zeros(24)
    true[LAYOUT.encode(episode())] = 3
    errors = (runs - true).ravel()
    deviation = np.sqrt(noise.variance(3) / errors.size)
    assert abs(errors.mean()) < stats.norm.isf(ALPHA / 2) * deviation
    assert errors.var() == pytest.approx(noise.variance(3), rel=5 * np.sqrt(5 / errors.size))


@pytest.mark.parametrize("numerator", [0, 1 << 32])
def test_impossible_laplace_noise_is_refused(numerator: int) -> None:
    with pytest.raises(ValueError, match="q must lie"):
        Laplace(numerator)


def test_no_fair_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="fair bits"):
        FairBits(0)
