"""The bounds: Clopper-Pearson's own numbers, coverage on a mechanism whose epsilon is known."""

import math

import numpy as np
import pytest
from scipy import stats

from riffle.experiments.audit.evidence import Bounds, Event, Scores, bound, lower, upper

ALPHA = 1e-6  # each statistical test fails by chance once in a million runs


@pytest.mark.parametrize("hits", [0, 1, 37, 99, 100])
def test_bounds_are_clopper_and_pearsons(hits: int) -> None:
    """scipy's two-sided interval at confidence 1 - 2 e has one-sided errors of e."""
    exact = stats.binomtest(hits, 100).proportion_ci(1 - 2 * 0.003, method="exact")
    assert float(lower(hits, 100, 0.003)) == pytest.approx(exact.low, abs=1e-12)
    assert float(upper(hits, 100, 0.003)) == pytest.approx(exact.high, abs=1e-12)


def test_events_count_ties_and_both_directions() -> None:
    scores = Scores(np.array([0.0, 1.0, 2.0]), np.array([-1.0, 0.0, 1.0]))
    assert Event("x", True, 1.0).hits(scores) == (2, 1)
    assert Event("x", False, 0.0).hits(scores) == (2, 1)


def answers(generator: np.random.Generator, trials: int, epsilon: float, beta: float) -> Scores:
    """Randomised response that tells all with probability beta: exactly (epsilon, beta)-DP."""
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))

    def one(bit: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        told = np.where(generator.random(trials) < truth, bit, 1 - bit) * 2.0 - 1.0
        return np.where(generator.random(trials) < beta, 20.0 * (2 * bit - 1), told)

    return Scores(one(1), one(0))


def bounds(seed: int, trials: int, epsilon: float, beta: float, error: float) -> Bounds:
    generator = np.random.default_rng(seed)
    tuning = {"x": answers(generator, trials // 2, epsilon, beta)}
    fresh = {"x": answers(generator, trials, epsilon, beta)}
    return bound(tuning, fresh, epsilon=epsilon, beta=beta, error=error)


def test_bounds_stay_below_a_known_epsilon_as_often_as_promised() -> None:
    """400 audits at error 0.2: more than 80 + margin wrong ones have probability below 1e-6."""
    wrong = 0
    for seed in range(400):
        found = bounds(seed, 2_000, 1.0, 0.05, error=0.2)
        wrong += found.epsilon > 1.0 or found.beta > 0.05
    assert wrong <= stats.binom.isf(ALPHA, 400, 0.2)


def test_bounds_come_close_to_a_known_epsilon() -> None:
    found = bounds(1, 200_000, 1.0, 0.05, error=0.01)
    assert 0.9 < found.epsilon <= 1.0
    assert 0.03 < found.beta <= 0.05


def test_a_claim_that_is_too_strong_is_refuted() -> None:
    generator = np.random.default_rng(2)
    tuning, fresh = ({"x": answers(generator, 20_000, 2.0, 0.1)} for _ in range(2))
    found = bound(tuning, fresh, epsilon=1.0, beta=0.01, error=1e-6)
    assert found.epsilon > 1.0
    assert found.beta > 0.1  # some of what (2, 0.1) allows counts as beta at epsilon 1


def test_the_best_distinguisher_is_chosen_on_the_tuning_sample() -> None:
    generator = np.random.default_rng(3)
    blind = Scores(generator.random(5_000), generator.random(5_000))
    samples = [{"blind": blind, "sees": answers(generator, 5_000, 1.0, 0.05)} for _ in range(2)]
    found = bound(*samples, epsilon=1.0, beta=0.05, error=0.01)
    assert found.epsilon_event.distinguisher == found.beta_event.distinguisher == "sees"


def test_no_distinguisher_is_our_own_error() -> None:
    empty = Scores(np.zeros(3), np.zeros(3))
    with pytest.raises(ValueError, match="distinguisher"):
        bound({}, {"x": empty}, epsilon=1.0, beta=0.1, error=0.1)
