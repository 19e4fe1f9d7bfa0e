"""Bandit-v0: the multi-armed bandit of `000`, section VI (X = 1, H = 1), with users who differ.

The global means are r*(a) ~ Uniform(0, 0.99), drawn once from ``seed``. A user's local means are
r(a) = r*(a) + xi(a), xi(a) ~ N(0, sigma^2) for every user and arm; the reward bit is
Bernoulli(clip(r(a), 0, 1)). Over the population a pull of arm a therefore is
Bernoulli(E[clip(r*(a) + xi, 0, 1)]), which is what `mdp` holds and what V* is the largest of.

With m = r*(a), u = m / sigma, v = (1 - m) / sigma, Phi and phi the normal law and its density:
E[clip(m + xi, 0, 1)] = m (Phi(v) - Phi(-u)) + sigma (phi(u) - phi(v)) + 1 - Phi(v).
"""

import numpy as np
from scipy.special import ndtr, ndtri

from riffle.common.randomness import Randomness, generator_for
from riffle.node_client.environments.tabular import Floats, TabularMDP

LARGEST_MEAN = 0.99


def clipped_mean(means: Floats, sigma: float) -> Floats:
    """E[clip(m + N(0, sigma^2), 0, 1)] for every mean m in [0, 1] (A,)."""
    if sigma == 0:
        return means.copy()
    u, v = means / sigma, (1 - means) / sigma
    inside = means * (ndtr(v) - ndtr(-u)) + sigma * (_density(u) - _density(v))
    return np.asarray(np.clip(inside + ndtr(-v), 0, 1))


def global_means(arms: int, seed: int) -> Floats:
    """r*(a) ~ Uniform(0, 0.99), shape (A,)."""
    return generator_for(seed, "Bandit-v0", arms).uniform(0, LARGEST_MEAN, arms)


class BanditEnvironment:
    """One pull a user, whose arms differ from the population's by N(0, sigma^2).

    Raises:
        ValueError: no arms, a mean outside [0, 1], or a negative sigma.
    """

    reward_range = (0.0, 1.0)
    absorbing = None

    def __init__(self, means: Floats, sigma: float) -> None:
        if means.size == 0 or means.min() < 0 or means.max() > 1 or not sigma >= 0:
            raise ValueError("a bandit needs arms with means in [0, 1], and sigma >= 0")
        self._means = means
        self._sigma = sigma
        self._user = means
        r = clipped_mean(means, sigma)
        self.mdp = TabularMDP(np.ones((1, 1, means.size, 1)), r[None, None], np.ones(1))
        self.sizes = self.mdp.sizes

    def reset(self, randomness: Randomness) -> int:
        """Draw a user: xi(a) for every arm, by the inverse of the normal law at 53 bits."""
        words = np.frombuffer(randomness.read(8 * self._means.size), dtype="<u8") >> 11
        xi = self._sigma * ndtri((words + 0.5) / (1 << 53))
        self._user = np.clip(self._means + xi, 0, 1)
        return 0

    def step(self, action: int, randomness: Randomness) -> tuple[int, float, bool]:
        """Pull an arm: this user's clipped mean."""
        return 0, float(self._user[action]), False


def _density(z: Floats) -> Floats:
    return np.asarray(np.exp(-z * z / 2) / np.sqrt(2 * np.pi))
