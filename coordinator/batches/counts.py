"""The private counts of a batch, and the value of its mixture estimated from them. Pure.

With rewards scaled to [0, 1] and turned into bits, R_h(x, a) of a batch of n episodes of mixture pi
counts reward bits. So sum R / n is an unbiased estimate of V^pi, whatever the environment's
dynamics. Its error has two parts, each given half of delta:

- sampling: a return lies in [0, H]; Hoeffding, H sqrt(log(4 / delta) / (2 n));
- noise: H X A entries with independent noise of variance v; Bernstein for centred terms of size at
  most b, (b l / 3 + sqrt(b^2 l^2 / 9 + 2 H X A v l)) / n with l = log(4 / delta).

The value is clipped to [0, H], where V^pi lies, which only brings it nearer. All of this holds for
honest reports; each dishonest one can move one report's counters.
"""

import math
from dataclasses import dataclass
from typing import Any

from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.workflow import debias
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.coordinator.learning.learner import BatchCounts, batch_counts


def private_counts(descriptor: BatchDescriptor, histogram: Ints) -> BatchCounts:
    """Returns unbiased counts with their variances from a batch's histogram (C + 1,).

    The last step of the analyzer in `common.mechanism.workflow`: drops the dummies, subtracts the
    noise's mean, and sums families that were not sent (`coordinator.learning.learner`).

    Raises ValueError if the histogram does not have one entry more than the batch has counters.
    """
    layout, noise, n = descriptor.layout, descriptor.to_noise(), descriptor.n
    if histogram.shape != (layout.counters + 1,):
        raise ValueError(f"{histogram.shape} entries for {layout.counters} counters and one")
    debiased = debias(noise, n, histogram)
    return batch_counts(layout, n, debiased, noise.variance(n), noise.term)


@dataclass(frozen=True, slots=True)
class ValueEstimate:
    """|value - V^pi| <= radius with probability ``confidence``; rewards scaled to [0, 1]."""

    value: float
    radius: float
    noise_deviation: float
    confidence: float


def value_estimate(counts: BatchCounts, delta: float) -> ValueEstimate | None:
    """Estimates the value of a batch's mixture; None if the batch counts no rewards."""
    if counts.rewards is None:
        return None
    n, H = counts.n, counts.layout.sizes.H
    variance = counts.rewards.size * counts.reward_variance
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


def counts_document(counts: BatchCounts) -> dict[str, Any]:
    """Returns counts with arrays as nested lists; `coordinator.api.models.Counts` describes it."""
    return {
        "transitions": counts.transitions.tolist(),
        "visits": counts.visits.tolist(),
        "rewards": None if counts.rewards is None else counts.rewards.tolist(),
        "transition_variance": counts.transition_variance,
        "visit_variance": counts.visit_variance,
        "reward_variance": counts.reward_variance,
    }
