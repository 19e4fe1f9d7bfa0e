"""Pure functions: a batch's private counts, their test, and the estimate of its mixture's value.

Rewards are scaled to [0, 1] and turned into bits. R(h, x, a) counts the reward bits that are 1 at
(h, x, a). The estimate of the value V^pi of a mixture pi is the sum of R over all (h, x, a),
divided by n. If all reports are honest, the estimate is unbiased. The estimate's error has two
parts. Each part has a bound that holds with probability 1 - delta / 2:

- sampling: H sqrt(log(4 / delta) / (2 n)), by Hoeffding's inequality;
- noise: (b l / 3 + sqrt(b^2 l^2 / 9 + 2 V l)) / n with l = log(4 / delta), by Bernstein's
  inequality. V is the sum of the noise variances of all entries of R. The noise of an entry is a
  sum of centred terms of size at most b.

Poisoning. True counts satisfy certain equations. Noise makes private counts deviate from them a
little; lies (false reports) make private counts deviate more. `check` tests these equations:

- flow: every step's transitions sum to n, and arrivals in a state at step h equal the state's
  visits at step h + 1. For each cell (h, x, a, x'), the test takes the part of the count that
  breaks these equations (`postprocess.imbalance`);
- total: all transitions of a batch sum to n times the number of counted steps;
- start: the states at step 0 are n draws from the declared start distribution;
- visits: if the visits of (x, a) have a counter, it equals the sum of (x, a)'s transitions over x';
- negative: no transition count is below zero;
- rewards: 0 <= R(x, a) <= N(x, a), where N(x, a) are the visits.

Let a deviation have variance V and be a sum of terms of size at most b. If all reports are honest,
the deviation's size exceeds r with probability at most 2 exp(-r^2 / (2 V + 2 b r / 3)), by
Bernstein's inequality. `CountCheck.chance` is the union bound over all tests of the batch. The
tests do not find lies that form whole episodes (docs/security.md gives numbers).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.workflow import debias
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.coordinator.learning.learner import BatchCounts, FloatArray, batch_counts
from riffle.coordinator.learning.postprocess import imbalance, leverage

FALSE_ALARM = 1e-5
"""A batch with a smaller ``chance`` is marked suspicious. A batch of honest reports is marked with
at most this probability."""
TINY = 1e-12  # added to variances, which are 0 if there is no noise (simulations)


def private_counts(descriptor: BatchDescriptor, histogram: Ints) -> BatchCounts:
    """Returns unbiased counts with their variances from a batch's histogram (C + 1,).

    Drops the dummies and subtracts the noise's mean.

    Raises ValueError if the histogram has not C + 1 entries, where C is the number of counters.
    """
    layout, noise, n = descriptor.layout, descriptor.batch_noise, descriptor.n
    if histogram.shape != (layout.counters + 1,):
        raise ValueError(f"{histogram.shape} entries for {layout.counters} counters and one")
    debiased = debias(noise, n, histogram)
    return batch_counts(layout, n, debiased, noise.variance(n), noise.term)


@dataclass(frozen=True, slots=True)
class ValueEstimate:
    """An estimate of V^pi for rewards scaled to [0, 1].

    With probability ``confidence``, ``value`` is at most ``radius`` away from V^pi. Noise alone
    gives ``value`` the standard deviation ``noise_deviation``.
    """

    value: float
    radius: float
    noise_deviation: float
    confidence: float


def value_estimate(counts: BatchCounts, delta: float) -> ValueEstimate | None:
    """Estimates the value of a batch's mixture; None if the batch counts no rewards."""
    if counts.rewards is None:
        return None
    n, H = counts.n, counts.layout.sizes.H
    variance = float(counts.reward_variance.sum())
    log_term = math.log(4 / delta)
    sampling = H * math.sqrt(log_term / (2 * n))
    linear = counts.term * log_term / 3
    noise = linear + math.sqrt(linear**2 + 2 * variance * log_term)
    return ValueEstimate(
        value=min(max(float(counts.rewards.sum()) / n, 0.0), float(H)),
        radius=sampling + noise / n,
        noise_deviation=math.sqrt(variance) / n,
        confidence=1 - delta,
    )


@dataclass(frozen=True, slots=True)
class CountCheck:
    """The test that a batch's counts fail worst.

    ``deviation`` says by how many standard deviations they fail. ``chance`` bounds the probability
    that honest reports deviate this far in at least one test.
    """

    test: str
    deviation: float
    chance: float

    @property
    def suspicious(self) -> bool:
        """Returns whether the batch is marked suspicious."""
        return self.chance < FALSE_ALARM


_Test = tuple[str, FloatArray, FloatArray | float, FloatArray | float]
"""A test's name, its deviations, and the variance and the largest term of each deviation."""


def check(counts: BatchCounts, d1: FloatArray, without_data: int = 0) -> CountCheck:
    """Tests a batch's counts for lies (see the module's docstring).

    ``d1`` (X,) is the declared start distribution. Up to ``without_data`` reports may hold only
    noise. If such reports explain a part of a deviation, that part is disregarded.
    """
    tests, number = list(_tests(counts, d1, without_data)), 0
    worst, exponent, deviation = "", -1.0, 0.0
    for name, residuals, variance, term in tests:
        r = np.abs(residuals)
        exponents = r**2 / (2 * (variance + term * r / 3) + TINY)
        number += r.size
        if exponents.max() > exponent:
            at = np.unravel_index(exponents.argmax(), r.shape)
            worst, exponent = name, float(exponents[at])
            deviation = float((r / np.sqrt(variance + TINY))[at])
    return CountCheck(worst, deviation, min(1.0, 2 * number * math.exp(-exponent)))


def _unexplained(deviations: FloatArray, effect: FloatArray | int) -> FloatArray:
    """Subtracts as much of ``effect`` from each deviation as brings the deviation nearest to 0."""
    return deviations - np.clip(deviations, np.minimum(effect, 0), np.maximum(effect, 0))


def _tests(counts: BatchCounts, d1: FloatArray, without_data: int) -> Iterator[_Test]:
    c, v, term, n = counts.transitions, counts.transition_variance, counts.term, counts.n
    layout, possible = counts.layout, counts.layout.possible
    share, largest = leverage(possible), v.max()
    broken = _unexplained(
        imbalance(c, n, possible), imbalance(np.zeros_like(c), without_data, possible)
    )
    # The part of a cell's count that breaks the equations does not depend on the action.
    part, share_of = np.abs(broken).max(axis=2), share.max(axis=2)
    yield "flow", part, largest * share_of, term * np.sqrt(share_of * share.max())
    deficit = _unexplained(np.array([c.sum() - len(c) * n]), -len(c) * without_data)
    yield "total", deficit, v.sum(), term
    yield "negative", np.minimum(c, 0), v, term
    if layout.layer in (None, 0):
        drawn = _unexplained(c[0].sum(axis=(1, 2)) - n * d1, -without_data)
        variance = n * d1 * (1 - d1)
        yield "start", drawn, v[0].sum(axis=(1, 2)) + variance, max(term, 1.0)
    if "visits" in layout.shapes:
        surplus = c.sum(axis=-1) - counts.visits
        yield "visits", surplus, v.sum(axis=-1) + counts.visit_variance, term
    if counts.rewards is not None:
        joint = layout.families == "joint"  # if so, R is a part of N; if not, R has its own noise
        spread = counts.visit_variance + (-1 if joint else 1) * counts.reward_variance
        yield "rewards", np.maximum(counts.rewards - counts.visits, 0), spread, term
        yield "rewards", np.minimum(counts.rewards, 0), counts.reward_variance, term
