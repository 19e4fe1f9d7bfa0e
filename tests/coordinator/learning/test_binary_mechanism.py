"""The Binary Mechanism against brute force, its levels, its noise and its sensitivity."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from riffle.coordinator.learning.learner import FloatArray, LearnerError
from riffle.coordinator.learning.privatizers import (
    NO_NOISE,
    AdditiveNoise,
    BinaryMechanism,
    NoiseLevels,
    Sensitivity,
    noise_of_draw,
    paper_guarantee,
    tree_levels,
)

UNIT = AdditiveNoise("gaussian", 1.0)


class Tape(np.random.Generator):
    """A generator whose draws are 1, 2, 4, ..., so that a sum of them tells which it holds."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))
        self.drawn = 0

    def normal(self, *_: object, **__: object) -> FloatArray:  # type: ignore[override]
        self.drawn += 1
        return np.array([2.0 ** (self.drawn - 1)])


@pytest.mark.parametrize("variant", [False, True])
@given(T=st.integers(1, 70), seed=st.integers(0, 9))
def test_without_noise_every_sum_is_exact(variant: bool, T: int, seed: int) -> None:
    stream = np.random.default_rng(seed).uniform(size=(T, 2, 3))
    mechanism = BinaryMechanism(T, (2, 3), NO_NOISE, np.random.default_rng(0), variant=variant)
    for t in range(1, T + 1):
        assert np.allclose(mechanism.add(stream[t - 1]), stream[:t].sum(axis=0))
    with pytest.raises(LearnerError, match=f"made for {T} contributions"):
        mechanism.add(stream[0])


@pytest.mark.parametrize(
    ("T", "most"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4), (9, 4)]
)
def test_levels_are_the_most_blocks_any_contribution_is_in(T: int, most: int) -> None:
    blocks = {
        (t - 2**j, t)
        for t in range(1, T + 1)
        for j in range(t.bit_length())
        if t >> j & 1 and t % 2**j == 0
    }
    used = {block for t in range(1, T + 1) for block in blocks if _in_the_sum(block, t)}
    each = [sum(start < i <= end for start, end in used) for i in range(1, T + 1)]
    assert max(each, default=0) == most == tree_levels(T)


def _in_the_sum(block: tuple[int, int], t: int) -> bool:
    start, end = block
    size = end - start
    return bool(t & size) and start == (t >> size.bit_length()) << size.bit_length()


@pytest.mark.parametrize(
    ("K", "most"), [(1, 0), (2, 1), (3, 2), (4, 2), (7, 3), (8, 3), (9, 4), (20_000, 15)]
)
def test_a_learner_of_K_episodes_needs_the_papers_ceil_log2_K_levels(K: int, most: int) -> None:
    assert tree_levels(K - 1) == most == math.ceil(math.log2(K))


@pytest.mark.parametrize("T", [1, 2, 3, 4, 7, 8, 9, 16])
def test_replacing_a_contribution_moves_at_most_that_many_noisy_blocks(T: int) -> None:
    # Blocks are recovered from the released sums: their noises are powers of two.
    moved = [_blocks_with(T, i) for i in range(1, T + 1)]
    assert max(moved) == tree_levels(T)
    assert moved[0] == tree_levels(T)


def _blocks_with(T: int, i: int) -> int:
    """Counts the distinct noises that are ever added to a sum with contribution i."""
    tape = Tape()
    mechanism = BinaryMechanism(T, (1,), UNIT, tape)
    beside: set[int] = set()
    for t in range(1, T + 1):
        mechanism.add(np.zeros(1))
        # The sum holds one block a level; at most one of them covers i.
        covering = [j for j in range(tree_levels(T)) if t >> j & 1 and _covers(t, j, i)]
        for j in covering:
            beside.add(int(mechanism._blocks[j, 0]))
    return len(beside)


def _covers(t: int, j: int, i: int) -> bool:
    start = (t >> (j + 1)) << (j + 1)
    return start < i <= start + (1 << j)


def test_a_blocks_noise_is_drawn_once_and_used_as_long_as_the_block_is() -> None:
    mechanism = BinaryMechanism(7, (1,), UNIT, Tape())
    released = [float(mechanism.add(np.zeros(1))[0]) for _ in range(7)]
    # Noise b_t = 2^(t-1) belongs to the block that t completes: S_3 = b_2 + b_3, S_7 = b_4+b_6+b_7.
    assert released == [1, 2, 2 + 4, 8, 8 + 16, 8 + 32, 8 + 32 + 64]


@pytest.mark.parametrize("variant", [False, True])
def test_the_noise_has_the_stated_variance_at_every_t(variant: bool) -> None:
    T, copies = 9, 4_000
    mechanism = BinaryMechanism(T, (copies,), UNIT, np.random.default_rng(5), variant=variant)
    for t in range(1, T + 1):
        noise = mechanism.add(np.zeros(copies))
        terms = tree_levels(T) if variant else t.bit_count()
        assert mechanism.terms(t) * mechanism.noise.variance == terms
        # chi-square with `copies` degrees of freedom; 18 tests at level 1e-5 each.
        law = stats.chi2(copies)
        assert law.ppf(5e-6) < float((noise**2).sum()) / terms < law.ppf(1 - 5e-6)


def test_the_variants_noises_have_one_law() -> None:
    mechanism = BinaryMechanism(
        8, (3_000,), AdditiveNoise("laplace", 2.0), np.random.default_rng(6), variant=True
    )
    noises = [mechanism.add(np.zeros(3_000)) for _ in range(8)]
    # Assumption 3.2 of 004; seven two-sample tests at level 1e-4 each.
    for later in noises[1:]:
        assert stats.ks_2samp(noises[0], later).pvalue > 1e-4


def test_calibrations_are_the_papers_and_the_exact_one() -> None:
    sensitivity = Sensitivity.of_cells(18)
    depth = tree_levels(19_999)
    paper, exact = (
        noise_of_draw(name, sensitivity=sensitivity, H=6, depth=depth, epsilon=1.0, beta=1e-5)
        for name in get_args(NoiseLevels)
    )
    assert (paper.kind, paper.scale) == ("laplace", 3 * 6 * 15)
    assert paper_guarantee(sensitivity, 6, 1.0) == 2.0
    full_information = Sensitivity.of_cells(12) + Sensitivity.of_losses(20)
    assert paper_guarantee(full_information, 6, 1.0) == pytest.approx(44 / 18)
    assert exact.kind == "gaussian"
    assert exact.variance < paper.variance / 10


def test_two_neighbouring_streams_differ_in_their_sums_by_their_difference() -> None:
    streams = np.zeros((2, 9, 4))
    streams[0, 4, 0] = streams[1, 4, 3] = 1.0
    sums = []
    for stream in streams:
        mechanism = BinaryMechanism(9, (4,), UNIT, np.random.default_rng(0))
        sums.append(np.stack([mechanism.add(sigma) for sigma in stream]))
    difference = np.abs(sums[0] - sums[1]).sum(axis=1)
    assert np.allclose(difference, [0, 0, 0, 0, 2, 2, 2, 2, 2])
