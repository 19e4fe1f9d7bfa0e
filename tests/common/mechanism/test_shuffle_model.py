"""The mechanism: exact noise, fixed length, uniform permutation, unbiased counts."""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from riffle.common.mechanism.counters import CounterLayout, Episode, Sizes
from riffle.common.mechanism.parameters import Noise, Padding
from riffle.common.mechanism.randomness import SeededRandomness, SystemRandomness
from riffle.common.mechanism.shuffle_model import (
    count,
    debias,
    draw_noise,
    encode,
    pad,
    permutation,
)
from tests.common.mechanism.roles import shuffle_counts

ALPHA = 1e-6  # each statistical test fails by chance once in a million runs
SYSTEM = SystemRandomness()
LAYOUT = CounterLayout(Sizes(2, 2, 2), "joint")


def episode() -> Episode:
    return Episode(np.array([0, 1, 0]), np.array([1, 0]), np.array([0, 1]))


@pytest.mark.parametrize(
    "noise", [Noise(7, 1, 1), Noise(40, 1, 6), Noise(3, 5, 16), Noise(5, 3 << 20, 24)]
)
def test_noise_of_a_counter_is_exactly_binomial(noise: Noise) -> None:
    counters = 20_000
    per_counter = np.bincount(draw_noise(counters, noise, SYSTEM), minlength=counters)
    law = stats.binom(noise.bits, noise.p)
    cells = max(1, int(law.isf(20 / counters)))
    observed = np.array([*np.bincount(per_counter, minlength=cells)[:cells], 0.0])
    observed[-1] = counters - observed[:-1].sum()
    expected = counters * np.array([*law.pmf(np.arange(cells)), law.sf(cells - 1)])
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > ALPHA


def test_noise_spans_several_reads_without_bias() -> None:
    noise = Noise(2**20 + 3, 1, 10)
    ones = draw_noise(3, noise, SYSTEM)
    for counter in range(3):
        got = int((ones == counter).sum())
        assert stats.binomtest(got, noise.bits, noise.p).pvalue > ALPHA


@given(st.integers(0, 6), st.integers(0, 30), st.integers(0, 20))
def test_a_report_has_always_l_messages_and_keeps_its_data(
    data: int, noise: int, slots: int
) -> None:
    padding = Padding(data_slots=6, noise_slots=slots)
    messages = pad(np.arange(data), np.full(noise, 50), padding, dummy=99, randomness=SYSTEM)
    assert messages.size == padding.messages
    assert messages[messages < 50].tolist() == list(range(data))
    assert (messages == 50).sum() == min(noise, slots)
    assert (messages == 99).sum() == padding.messages - data - min(noise, slots)


def test_data_beyond_its_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="7 data messages"):
        pad(np.arange(7), np.arange(0), Padding(6, 10), 99, SYSTEM)


def test_overflowing_noise_is_thinned_uniformly() -> None:
    kept = np.zeros(4, dtype=np.int64)
    for _ in range(4_000):
        kept += np.bincount(pad(np.arange(0), np.arange(4), Padding(0, 2), 9, SYSTEM), minlength=4)[
            :4
        ]
    assert stats.chisquare(kept).pvalue > ALPHA


def test_a_failed_environment_still_sends_noise_and_padding() -> None:
    noise, padding = Noise(8, 1, 1), Padding(LAYOUT.data_slots, 400)
    messages = encode(LAYOUT, noise, padding, None, SYSTEM)
    assert messages.size == padding.messages
    ones = int((messages != LAYOUT.dummy).sum())
    assert stats.binomtest(ones, LAYOUT.counters * noise.bits, noise.p).pvalue > ALPHA


def test_permutation_is_uniform() -> None:
    orders = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    seen = np.zeros(24)
    for _ in range(24_000):
        seen[orders[tuple(int(i) for i in permutation(4, SYSTEM))]] += 1
    assert stats.chisquare(seen).pvalue > ALPHA


@dataclass
class Fixed:
    """Keys that were drawn before, one after the other."""

    keys: npt.NDArray[np.uint64]
    taken: int = 0

    def read(self, size: int) -> bytes:
        start, self.taken = self.taken, self.taken + size
        return self.keys.astype("<u8").tobytes()[start : self.taken]


@pytest.mark.parametrize("bits", [0, 2, 12, 20, 64])
@pytest.mark.parametrize("at_once", [64, 1 << 16])
def test_a_permutation_sorts_whole_keys_where_first_halves_are_equal_too(
    bits: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index takes the place of the last 9 bits: of 12, 3 are left to sort by; of 2, none."""
    monkeypatch.setattr("riffle.common.mechanism.shuffle_model.KEYS_AT_ONCE", at_once)
    largest = (1 << bits) - 1
    keys = np.random.default_rng(7).integers(largest, size=(500, 2), dtype=np.uint64, endpoint=True)
    whole = np.lexsort((keys[:, 1], keys[:, 0]))
    assert permutation(500, Fixed(keys)).tolist() == whole.tolist()


@pytest.mark.parametrize("size", [0, 1, 2])
def test_permutations_of_none_and_one(size: int) -> None:
    assert sorted(permutation(size, SYSTEM).tolist()) == list(range(size))


def test_counting_drops_dummies_and_refuses_unknown_indices() -> None:
    messages = np.array([0, 3, 3, LAYOUT.dummy])
    assert count(LAYOUT, messages).tolist() == [1, 0, 0, 2] + [0] * (LAYOUT.counters - 4)
    for wrong in (-1, LAYOUT.dummy + 1):
        with pytest.raises(ValueError, match="outside"):
            count(LAYOUT, np.array([wrong]))


def test_all_roles_together_give_unbiased_counts_of_the_stated_variance() -> None:
    noise, n, rounds = Noise(12, 1, 3), 20, 400
    padding = Padding(LAYOUT.data_slots, LAYOUT.counters * noise.bits)
    truth = n * np.bincount(LAYOUT.encode(episode()), minlength=LAYOUT.counters)
    errors = np.array(
        [
            shuffle_counts(LAYOUT, noise, padding, [episode()] * n, SYSTEM) - truth
            for _ in range(rounds)
        ]
    )
    z = errors.sum() / np.sqrt(errors.size * noise.variance(n))
    assert abs(z) < stats.norm.isf(ALPHA / 2)
    ratio = (errors**2).sum() / noise.variance(n)
    low, high = stats.chi2(errors.size).ppf([ALPHA, 1 - ALPHA])
    assert low * 0.97 < ratio < high * 1.03  # binomial tails differ a little from normal ones


def test_equal_keys_draw_equal_reports_and_other_keys_others() -> None:
    noise, padding = Noise(8, 1, 1), Padding(LAYOUT.data_slots, 200)

    def report(*key: str | int) -> list[int]:
        source = SeededRandomness.keyed(1, *key)
        return [int(m) for m in encode(LAYOUT, noise, padding, episode(), source)]

    assert report("run", "batch", 3, "noise") == report("run", "batch", 3, "noise")
    assert report("run", "batch", 3, "noise") != report("run", "batch", 4, "noise")
    assert report("run", "batch", 3, "noise") != report("run", "batch", 3, "environment")


def test_debias_subtracts_the_mean_of_all_reports() -> None:
    assert debias(np.array([10, 12]), 8, Noise(2, 1, 2)).tolist() == [6.0, 8.0]
