"""Local Privatizer: every user adds noise to the own contribution before it leaves (004, 5.2).

    S~_t = sum_{i <= t} (sigma_i + Z_i),   Z_i independent for every user and counter,

so the noise on S_t has variance t Var Z.

Privacy. One user's message is the whole noisy contribution; two possible contributions differ by at
most Delta_1 in L1 and Delta_2 in L2. Laplace noise of b = Delta_1 / epsilon is epsilon-LDP; the
analytic Gaussian mechanism is (epsilon, beta)-LDP. A user sends once, so nothing composes. `tight`
is the smaller of the two: Laplace for a bandit (H = 1), Gaussian for longer episodes.

`paper` is Lap(3 H / epsilon) on three families of counters (004, section 5.2). It counts H changes
a family where two trajectories differ in 2 H, so it is 2 epsilon-LDP; see
`central.paper_guarantee`, also for losses under full information.

Under joint DP the same noise on bandit losses is what 004 uses (Lemma 5.6).
"""

from __future__ import annotations

import numpy as np

from riffle.coordinator.learning.learner import FloatArray
from riffle.coordinator.learning.privatizers.interface import (
    AdditiveNoise,
    NoiseLevels,
    Sensitivity,
    least,
)


def local_noise(
    name: NoiseLevels, *, sensitivity: Sensitivity, H: int, epsilon: float, beta: float
) -> AdditiveNoise:
    """Noise of one user's contribution of this sensitivity."""
    if name == "paper":
        return AdditiveNoise("laplace", 3.0 * H / epsilon)
    return least(sensitivity, epsilon, beta)


class LocalPrivatizer:
    """Private running sums of arrays of one shape, each made private by its user."""

    def __init__(
        self, shape: tuple[int, ...], noise: AdditiveNoise, generator: np.random.Generator
    ) -> None:
        self.noise = noise
        self._generator = generator
        self._total = np.zeros(shape)

    def privatize(self, sigma: FloatArray) -> FloatArray:
        """The user's half: what is sent."""
        return sigma + self.noise.draw(self._generator, sigma.shape)

    def add(self, sigma: FloatArray) -> FloatArray:
        """Both halves: the next user's message is added to the sum."""
        self._total += self.privatize(sigma)
        return self._total.copy()

    def variance(self, t: int) -> float:
        """Variance of the noise on one counter of S_t."""
        return t * self.noise.variance

    def deviation(self, t: int, log_term: float) -> float:
        """Bound on the noise of S_t, exceeded with probability at most 2 exp(-log_term)."""
        return self.noise.deviation(t, log_term)
