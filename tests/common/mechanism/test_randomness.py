"""Draws of binomial noise: exactly the law, whatever the first bits leave open."""

from dataclasses import dataclass, field
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from riffle.common.mechanism.parameters import Noise
from riffle.common.mechanism.randomness import BLOCK, OPEN, SystemRandomness, _law, draw_counts

ALPHA = 1e-6  # each statistical test fails by chance once in a million runs
SYSTEM = SystemRandomness()
NOISES = [
    Noise(1, 1, 1),
    Noise(4, 1, 1),
    Noise(45, 4_136_996, 32),
    Noise(5, 3, 4),
    Noise(40, 1, 8),
]


@dataclass
class Script:
    """Bytes written down beforehand; counts how many were read."""

    data: bytes
    read_at: list[int] = field(default_factory=list)

    def read(self, size: int) -> bytes:
        head, self.data = self.data[:size], self.data[size:]
        assert len(head) == size
        self.read_at.append(size)
        return head


def cumulative(noise: Noise) -> list[Fraction]:
    p = Fraction(noise.p_numerator, 1 << noise.p_log2)
    masses = [comb(noise.bits, j) * p**j * (1 - p) ** (noise.bits - j) for j in range(noise.bits)]
    return [sum(masses[: j + 1], Fraction(0)) for j in range(noise.bits)]


def ones_at(u: Fraction, F: list[Fraction]) -> int:
    return sum(boundary <= u for boundary in F)


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_first_bits_decide_exactly_where_no_boundary_lies_between_their_ends(noise: Noise) -> None:
    F, table = cumulative(noise), _law(noise).ones
    for boundary in {*F, Fraction(0)}:
        for u in {int(boundary * 2**16) + i for i in (-1, 0, 1)} & set(range(2**16)):
            ends = ones_at(Fraction(u, 2**16), F), ones_at(Fraction(u + 1, 2**16), F)
            inside = any(u < f * 2**16 < u + 1 for f in F)
            assert table[u] == OPEN if inside else table[u] == ends[0]
    settled = table[table != OPEN].astype(int)
    assert (np.diff(settled) >= 0).all(), "more of U is never fewer ones"


@pytest.mark.parametrize("noise", [Noise(5, 3, 4), Noise(2, 4_136_996, 32)], ids=str)
@given(st.integers(0, 2**64 - 1), st.integers(-1, 1))
def test_more_bits_settle_what_the_first_leave_open(noise: Noise, word: int, near: int) -> None:
    F, table = cumulative(noise), _law(noise).ones
    for u in np.flatnonzero(table == OPEN).tolist():
        boundary = next(int((f * 2**16 - u) * 2**64) for f in F if u < f * 2**16 < u + 1)
        for more in (word, min(2**64 - 1, max(0, boundary + near))):
            words = [more] + [word] * 9
            script = Script(b"".join(one.to_bytes(8, "little") for one in words))
            number = sum(one << 64 * (9 - i) for i, one in enumerate(words))
            U = Fraction((u << 640) + number, 1 << 656)
            assert _law(noise).settle(u, script) == ones_at(U, F)


def test_a_tie_is_drawn_on_until_it_is_broken() -> None:
    noise = Noise(3, 0x12345678, 32)
    F = cumulative(noise)[0]
    number = int(F * 2**144)  # U agrees with F(0) in its first 144 bits: F(0) has 96
    first, second, third = number >> 128, number >> 64 & (2**64 - 1), number & (2**64 - 1)
    for last, ones, reads in ((third, 1, 2), (third - 1, 0, 2)):
        script = Script(
            first.to_bytes(2, "little") + second.to_bytes(8, "little") + last.to_bytes(8, "little")
        )
        assert draw_counts(1, noise, script).tolist() == [ones]
        assert script.read_at == [2] + [8] * reads


@pytest.mark.parametrize(
    "noise", [Noise(BLOCK + 3, 1, 3), Noise(5 * BLOCK, 1, 9), *NOISES], ids=str
)
def test_every_counter_has_the_binomial_law(noise: Noise) -> None:
    counters = 20_000
    law = stats.binom(noise.bits, noise.p)
    low, high = int(law.ppf(20 / counters)), int(law.isf(20 / counters))
    counts = np.clip(draw_counts(counters, noise, SYSTEM), low, high) - low
    expected = law.pmf(np.arange(low, high + 1))
    expected[0], expected[-1] = law.cdf(low), law.sf(high - 1)
    observed = np.bincount(counts, minlength=expected.size)
    assert stats.chisquare(observed, counters * expected, sum_check=False).pvalue > ALPHA


def test_many_blocks_are_drawn_piece_by_piece() -> None:
    noise = Noise(BLOCK * 3000 + 7, 1, 10)
    for count in draw_counts(400, noise, SYSTEM)[:3]:
        assert stats.binomtest(int(count), noise.bits, noise.p).pvalue > ALPHA
