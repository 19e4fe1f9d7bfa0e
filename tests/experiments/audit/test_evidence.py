"""The bounds equal Clopper-Pearson's and cover a mechanism of known epsilon."""

import math

import numpy as np
import pytest
from scipy import stats

from riffle.experiments.audit.attack import Bounds, Event, Scores, bound, lower, upper

ALPHA = 1e-6  # each statistical test fails by chance once in a million runs


@pytest.mark.parametrize("hits", [0, 1, 37, 99, 100])
def test_bounds_equal_scipys_clopper_pearson_interval(hits: int) -> None:
    """scipy's two-sided interval at confidence 1 - 2 e has one-sided errors of e."""
    exact = stats.binomtest(hits, 100).proportion_ci(1 - 2 * 0.003, method="exact")
    assert float(lower(hits, 100, 0.003)) == pytest.approx(exact.low, abs=1e-12)
    assert float(upper(hits, 100, 0.003)) == pytest.approx(exact.high, abs=1e-12)


def test_events_count_ties_and_both_directions() -> None:
    scores = Scores(np.array([0.0, 1.0, 2.0]), np.array([-1.0, 0.0, 1.0]))
    assert Event("x", True, 1.0).hits(scores) == (2, 1)
    assert Event("x", False, 0.0).hits(scores) == (2, 1)


def answers(generator: np.random.Generator, trials: int, epsilon: float, beta: float) -> Scores:
    """Randomised response that reveals all with probability beta: exactly (epsilon, beta)-DP."""
    honest_share = math.exp(epsilon) / (1 + math.exp(epsilon))

    def one(bit: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        answer = np.where(generator.random(trials) < honest_share, bit, 1 - bit) * 2.0 - 1.0
        return np.where(generator.random(trials) < beta, 20.0 * (2 * bit - 1), answer)

    return Scores(one(1), one(0))


def bounds(seed: int, trials: int, epsilon: float, beta: float, error: float) -> Bounds:
    generator = np.random.default_rng(seed)
    tuning = {"x": answers(generator, trials // 2, epsilon, beta)}
    fresh = {"x": answers(generator, trials, epsilon, beta)}
    return bound(tuning, fresh, epsilon=epsilon, beta=beta, error=error)


def test_bounds_stay_below_a_known_epsilon_as_often_as_promised() -> None:
    """400 audits at error 0.2: more violations than 80 + margin have probability below 1e-6."""
    violations = 0
    for seed in range(400):
        result = bounds(seed, 2_000, 1.0, 0.05, error=0.2)
        violations += result.epsilon > 1.0 or result.beta > 0.05
    assert violations <= stats.binom.isf(ALPHA, 400, 0.2)


def test_bounds_come_close_to_a_known_epsilon() -> None:
    result = bounds(1, 200_000, 1.0, 0.05, error=0.01)
    assert 0.9 < result.epsilon <= 1.0
    assert 0.03 < result.beta <= 0.05


def test_a_claim_that_is_too_strong_is_refuted() -> None:
    generator = np.random.default_rng(2)
    tuning, fresh = ({"x": answers(generator, 20_000, 2.0, 0.1)} for _ in range(2))
    result = bound(tuning, fresh, epsilon=1.0, beta=0.01, error=1e-6)
    assert result.epsilon > 1.0
    assert result.beta > 0.1  # some of what (2, 0.1) allows counts as beta at epsilon 1


def test_the_best_distinguisher_is_chosen_on_the_tuning_sample() -> None:
    generator = np.random.default_rng(3)
    blind = Scores(generator.random(5_000), generator.random(5_000))
    samples = [{"blind": blind, "sees": answers(generator, 5_000, 1.0, 0.05)} for _ in range(2)]
    result = bound(*samples, epsilon=1.0, beta=0.05, error=0.01)
    assert result.epsilon_event.distinguisher == result.beta_event.distinguisher == "sees"


def test_bounds_without_a_distinguisher_are_an_error() -> None:
    empty = Scores(np.zeros(3), np.zeros(3))
    with pytest.raises(ValueError, match="distinguisher"):
        bound({}, {"x": empty}, epsilon=1.0, beta=0.1, error=0.1)
