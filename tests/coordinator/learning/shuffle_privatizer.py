"""Shuffle Privatizer: the mechanism of `common.mechanism.shuffle_model`, as one of batch sums.

Contributions here are whole batches: sigma_t is the sum over the n users of batch t. Every batch
has Binomial(n bits, p) noise of its own on every counter, made by its users and never by a trusted
party; a user is in one batch, so batches compose in parallel and each spends (epsilon, beta).

Its privacy is stated in `common.mechanism.shuffle_model` and computed by `common.accounting`;
this is the adapter through which learners of running sums can use it. The noise is drawn at the
level of the population: one binomial a counter has the law of all users' bits together.
"""

from __future__ import annotations

import math

import numpy as np

from riffle.common.mechanism.parameters import Noise
from riffle.coordinator.learning.learner import FloatArray
from riffle.coordinator.learning.postprocess import precision


class ShufflePrivatizer:
    """Private running sums over batches of n users each, all honest."""

    def __init__(
        self, shape: tuple[int, ...], noise: Noise, n: int, generator: np.random.Generator
    ) -> None:
        self.noise = noise
        self.n = n
        self._generator = generator
        self._total = np.zeros(shape)

    def release(self, sigma: FloatArray) -> FloatArray:
        """One batch alone: its noisy sum less the noise's mean (what SDP-PE, forgetting, uses)."""
        bits = self._generator.binomial(self.n * self.noise.bits, self.noise.p, sigma.shape)
        return sigma + (bits - self.noise.mean(self.n))

    def add(self, sigma: FloatArray) -> FloatArray:
        """The next batch is added to the private sum."""
        self._total += self.release(sigma)
        return self._total.copy()

    def variance(self, t: int) -> float:
        """Variance of the noise on one counter after t batches."""
        return t * self.noise.variance(self.n)

    def deviation(self, t: int, log_term: float) -> float:
        """Bound on that noise, exceeded with probability at most 2 exp(-log_term) (Bernstein)."""
        return precision(self.variance(t), 1, 2.0 * math.exp(-log_term)) / 4.0
