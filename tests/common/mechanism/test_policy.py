"""Mixtures: integer weights, exact draws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.mechanism.counters import Sizes
from riffle.common.mechanism.policy import TOTAL_WEIGHT, Mixture


def distinct_policies(count: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.int64]]:
    return np.arange(count, dtype=np.int64)[:, None, None] * np.ones((1, 2, 3), dtype=np.int64)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(lambda p: sum(p) > 0))
def test_rounding_keeps_the_total_and_is_within_one_unit(chances: list[float]) -> None:
    mixture = Mixture.from_probabilities(distinct_policies(len(chances)), chances)
    assert int(mixture.weights.sum()) == TOTAL_WEIGHT
    exact = np.array(chances) / np.sum(chances) * TOTAL_WEIGHT
    kept = mixture.policies[:, 0, 0]
    assert np.all(np.abs(mixture.weights - exact[kept]) <= 1 + 1e-3)


def test_equal_policies_are_merged_and_zero_weights_dropped() -> None:
    policies = np.concatenate([distinct_policies(2), distinct_policies(2)])
    mixture = Mixture.from_probabilities(policies, [0.5, 0.0, 0.5, 0.0])
    assert mixture.same_as(Mixture.single(policies[0]))


def test_every_word_selects_by_weight() -> None:
    weights = np.array([1, 2**31, 2**31 - 1], dtype=np.int64)
    mixture = Mixture(distinct_policies(3), weights)
    edges = {0: 0, 1: 1, 2**31: 1, 2**31 + 1: 2, 2**32 - 1: 2}
    assert {w: int(mixture.pick(w)[0, 0]) for w in edges} == edges


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([TOTAL_WEIGHT - 1, 2], "sum to"),
        ([TOTAL_WEIGHT, 0], "positive"),
        ([TOTAL_WEIGHT + 1, -1], "positive"),
        ([TOTAL_WEIGHT], "weights \\(M,\\)"),
    ],
)
def test_wrong_weights_are_refused(weights: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture(distinct_policies(2), np.array(weights, dtype=np.int64))


def test_policies_must_fit_the_environment() -> None:
    mixture = Mixture.single(distinct_policies(3)[2])
    mixture.check(Sizes(X=3, A=3, H=2))
    with pytest.raises(ValueError, match="action outside"):
        mixture.check(Sizes(X=3, A=2, H=2))
    with pytest.raises(ValueError, match="shape"):
        mixture.check(Sizes(X=2, A=3, H=2))


@pytest.mark.parametrize("chances", [[], [0.0, 0.0], [-0.1, 1.1]])
def test_impossible_probabilities_are_refused(chances: list[float]) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        Mixture.from_probabilities(distinct_policies(len(chances)), chances)
