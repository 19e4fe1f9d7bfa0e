"""Privatizers: private running sums that satisfy the assumptions of papers 000 and 004.

Privatizers are for simulation. The services add other noise (`common.mechanism.workflow`).

User t contributes sigma_t, an array of one entry per counter; S_t = sigma_1 + ... + sigma_t. A
Privatizer releases S_t plus noise. The noise on each counter is the sum of `terms(t)` independent
draws of `noise`. The noise has mean zero, and a known bound (`AdditiveNoise.deviation`; Assumption
4 of 000, Assumption 2.3 of 004).

There are two calibrations. `paper` is the papers' Laplace noise, taken literally; `paper_guarantee`
is the epsilon that this noise really gives. `exact` is the least noise with a proof of (epsilon,
beta)-DP: Laplace for few counters, Gaussian for many. Two populations are neighbours if
one user is replaced by another. Replacing a user lowers one entry and raises another, each by at
most one, in every counter family at every step.

**Central Privatizer**: the Binary Mechanism (Chan, Shi, Song 2011) and its variant (004, Alg. 4). A
trusted agent sees every contribution and releases S_t for t = 1..T. A block of level j is the sum
of 2^j contributions and ends at a multiple of 2^j. S_t has one block for each bit of t that is 1:

    t = 2^{j_1} + 2^{j_2} + ... (j_1 > j_2 > ...),   S_t = block_{j_1} + block_{j_2} + ....

Each block gets noise once, when it is complete. The variant adds fresh draws until S_t has one
draw for each level. The noise on S_t then has the same law for all t (Assumption 3.2 of 004).

A contribution is in at most one block of each level with 2^j <= T (`tree_levels`). A learner of K
episodes needs S_1..S_{K-1}, because policy k uses users i < k. Hence T = K - 1.

Privacy: given the earlier releases, no other trajectory depends on the replaced user. So replacing
a user changes only the blocks that contain the user's contribution. Let Delta_1 and Delta_2 be a
contribution's sensitivities in L1 and L2 norm. The vector of all blocks has the sensitivities
levels * Delta_1 and sqrt(levels) * Delta_2. Laplace noise of scale levels * Delta_1 / epsilon
composes adaptively to epsilon-DP. The analytic Gaussian mechanism is (epsilon, beta)-DP, even if
later contributions are chosen adaptively (Denisov et al. 2022). The policies shown to other users
are post-processing, so the run is jointly DP (Hsu et al. 2014).

**Local Privatizer** (004, 5.2): every user adds noise to their contribution before it leaves, so
S_t has t draws of noise. A user sends only one message, so nothing composes.

**Noise of the paper**: Lap(3 H depth / epsilon) on three families of counters (004, section 5.1).
The depth is ceil(log2 K) for a Central Privatizer, and 1 for a Local Privatizer. This noise covers
H changes in each family, but replacing a user makes 2 H changes. So the noise gives only 2
epsilon-DP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from riffle.common.accounting import gaussian_variance
from riffle.coordinator.learning.learner import FloatArray, LearnerError

NoiseKind = Literal["none", "laplace", "gaussian"]
NoiseLevels = Literal["paper", "exact"]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The largest change of all counters together if one user is replaced, in L1 and L2 norm."""

    l1: float
    l2: float

    @classmethod
    def of_cells(cls, cells: int) -> Sensitivity:
        """Returns the sensitivity if `cells` counters rise by 1 and `cells` others fall by 1."""
        return cls(2.0 * cells, math.sqrt(2.0 * cells))

    @classmethod
    def of_losses(cls, pairs: int) -> Sensitivity:
        """Returns the sensitivity of `pairs` losses in [0, 1], all of which may change at once."""
        return cls(float(pairs), math.sqrt(pairs))

    def __add__(self, other: Sensitivity) -> Sensitivity:
        """Returns the sensitivity of two families of counters that are released together."""
        return Sensitivity(self.l1 + other.l1, math.hypot(self.l2, other.l2))

    def repeated(self, times: int) -> Sensitivity:
        """Returns the sensitivity if every contribution enters `times` released numbers."""
        return Sensitivity(times * self.l1, math.sqrt(times) * self.l2)


@dataclass(frozen=True, slots=True)
class AdditiveNoise:
    """Independent noise of one kind. `scale` is b of Lap(b) or sigma of N(0, sigma^2)."""

    kind: NoiseKind
    scale: float

    @property
    def variance(self) -> float:
        """The variance of one draw."""
        return {"none": 0.0, "laplace": 2.0, "gaussian": 1.0}[self.kind] * self.scale**2

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        """Draws noise of this shape."""
        if self.kind == "none":
            return np.zeros(shape)
        if self.kind == "laplace":
            return generator.laplace(0.0, self.scale, shape)
        return generator.normal(0.0, self.scale, shape)

    def deviation(self, terms: int, log_term: float) -> float:
        """Returns a bound on the absolute value of a sum of `terms` draws of this noise.

        The bound fails with probability <= 2 exp(-log_term). With l = log_term, the Gaussian bound
        is sigma sqrt(2 terms l). The sum of draws of Lap(b) is sub-gamma with variance factor 2
        terms b^2 and scale b. So the Laplace bound is b (2 sqrt(terms l) + l) (Boucheron et al.
        2003).
        """
        if self.kind == "none" or terms == 0:
            return 0.0
        if self.kind == "gaussian":
            return self.scale * math.sqrt(2.0 * terms * log_term)
        return self.scale * (2.0 * math.sqrt(terms * log_term) + log_term)


NO_NOISE = AdditiveNoise("none", 0.0)


def least_noise(sensitivity: Sensitivity, epsilon: float, beta: float) -> AdditiveNoise:
    """Returns (epsilon, beta)-DP noise: Laplace or Gaussian, whichever has the smaller variance.

    Laplace noise of scale b = Delta_1 / epsilon is epsilon-DP (Dwork et al. 2006), where Delta_1 is
    the sensitivity in L1 norm. Theorem 8 of Balle and Wang 2018 gives the least Gaussian noise.
    """
    unit = gaussian_variance(epsilon, beta, 1) / 2.0
    gaussian = AdditiveNoise("gaussian", sensitivity.l2 * math.sqrt(unit))
    laplace = AdditiveNoise("laplace", sensitivity.l1 / epsilon)
    return min(laplace, gaussian, key=lambda noise: noise.variance)


def noise_of_draw(
    name: NoiseLevels, *, sensitivity: Sensitivity, H: int, depth: int, epsilon: float, beta: float
) -> AdditiveNoise:
    """Returns the noise of one draw if a contribution of this sensitivity enters `depth` sums.

    `depth` is 1 for a Local Privatizer, and max(`tree_levels(T)`, 1) for a Central Privatizer of T
    sums.
    """
    if name == "paper":
        return AdditiveNoise("laplace", 3.0 * H * depth / epsilon)
    return least_noise(sensitivity.repeated(depth), epsilon, beta)


def paper_guarantee(sensitivity: Sensitivity, H: int, epsilon: float) -> float:
    """Returns the true epsilon, Delta_1 / (3 H) epsilon, of any Privatizer calibrated by `paper`.

    Delta_1 is the L1 norm of `sensitivity`, for all families together. With three families of
    counts, Delta_1 is 6 H, so `paper` gives 2 epsilon. Under full information, with two families of
    counts and X A losses, Delta_1 is 4 H + X A.
    """
    return sensitivity.l1 / (3.0 * H) * epsilon


def tree_levels(T: int) -> int:
    """Returns the largest number of `BinaryMechanism` blocks that one of T contributions is in."""
    return T.bit_length()


class BinaryMechanism:
    """The Central Privatizer (004, Alg. 4). Adds noise to running sums of T arrays of one shape.

    With `variant`, every sum has equally many draws of noise.
    `add` raises LearnerError after T contributions.
    """

    def __init__(
        self,
        T: int,
        shape: tuple[int, ...],
        noise: AdditiveNoise,
        generator: np.random.Generator,
        *,
        variant: bool = False,
    ) -> None:
        self.T = T
        self.noise = noise
        self.variant = variant
        self._generator = generator
        self._total = np.zeros(shape)
        self._blocks = np.zeros((tree_levels(T), *shape))
        self._t = 0

    def add(self, sigma: FloatArray) -> FloatArray:
        """Takes the next contribution; returns the sum of all contributions so far, with noise."""
        if self._t == self.T:
            raise LearnerError(f"this Binary Mechanism was made for {self.T} contributions")
        self._t += 1
        self._total += sigma
        # t completes the block of its lowest 1-bit; this block replaces the blocks of lower levels.
        completed = (self._t & -self._t).bit_length() - 1
        self._blocks[:completed] = 0.0
        self._blocks[completed] = self.noise.draw(self._generator, self._total.shape)
        released: FloatArray = self._total + self._blocks.sum(axis=0)
        for _ in range(self.terms(self._t) - self._t.bit_count()):
            released += self.noise.draw(self._generator, self._total.shape)
        return released

    def terms(self, t: int) -> int:
        """Returns how many draws of noise the private sum of the first t contributions has."""
        return tree_levels(self.T) if self.variant and t > 0 else t.bit_count()


class LocalPrivatizer:
    """The Local Privatizer for arrays of one shape; each user makes their own array private."""

    def __init__(
        self, shape: tuple[int, ...], noise: AdditiveNoise, generator: np.random.Generator
    ) -> None:
        self.noise = noise
        self._generator = generator
        self._total = np.zeros(shape)

    def privatize(self, sigma: FloatArray) -> FloatArray:
        """Returns what a user sends: their contribution with noise."""
        return sigma + self.noise.draw(self._generator, sigma.shape)

    def add(self, sigma: FloatArray) -> FloatArray:
        """Adds the next user's message to the sum and returns the sum."""
        self._total += self.privatize(sigma)
        return self._total.copy()

    def terms(self, t: int) -> int:
        """Returns how many draws of noise are in the sum of the first t contributions."""
        return t
