"""Privatizers: private running sums, with the assumptions of the documents as contract.

User t contributes sigma_t, an array of one entry a counter; S_t = sigma_1 + ... + sigma_t. A
Privatizer releases S_t plus noise. The noise is a sum of `terms(t)` independent draws of `noise`.
Learners rely on this and on nothing else:

- Unbiased: the noise has mean zero and variance terms(t) noise.variance, both known beforehand.
- Bounded (Assumption 4 of 000, Assumption 2.3 of 004): a counter's noise after t users exceeds
  `noise.deviation(terms(t), l)` in absolute value with probability at most 2 exp(-l). With
  l = log(2 counters times / delta), a union bound makes E = 4 deviation: all noises at these times
  are within E / 4 with probability 1 - delta. Eq. 7 and the add-on (`postprocess.consistent`,
  5.1-5.2 of 004) then make counts that satisfy the rest of the assumption: N(x,a) = sum_x'
  N(x,a,x'), never below the true one, within E of it.
- Private, as stated below. Neighbours are everywhere the same: one user is replaced by another.

Two calibrations are offered by name: `paper` is the document's Laplace noise, literally, with the
guarantee it really gives (`paper_guarantee`); `tight` is the least noise that we can prove
(epsilon, beta)-DP with: Laplace for few counters, Gaussian for many.

These are simulations: noise comes from the caller's generator, which experiments seed. The services
make batch sums private, with integer noise from the system's CSPRNG (`common.mechanism.workflow`).

**Sensitivity.** Replacing one user changes one entry down and one up by at most one in every step
of every counter family: `Sensitivity.of_cells(cells)` with `CounterLayout.cells`. Losses in [0, 1]
that are all shown (full information, 004) change all together: `Sensitivity.of_losses(X A)`.

**Central Privatizer**: the Binary Mechanism (Chan, Shi, Song 2011) and its variant (004, Alg. 4). A
trusted agent sees every contribution and releases S_t for t = 1..T. The dyadic block of level j
ends at multiples of 2^j; S_t is the sum of the blocks named by the 1-bits of t:

    t = 2^{j_1} + 2^{j_2} + ... (j_1 > j_2 > ...),   S_t = block_{j_1} + block_{j_2} + ...,

and each block gets noise once, when it is completed. So S_t carries popcount(t) noises. The variant
adds fresh noises up to the number of levels: the noise on S_t is then identically distributed for
all t (Assumption 3.2 of 004), which costs variance and gives no privacy.

Levels: contribution i is in one block a level, for the levels with 2^j <= T, at most

    tree_levels(T) = floor(log2 T) + 1 = T.bit_length(),

reached by i = 1. A learner of K episodes needs S_1..S_{K-1} (policy k uses users i < k; nobody uses
S_K), hence T = K - 1 and (K-1).bit_length() = ceil(log2 K) levels: what Algorithm 4 counts. Read
literally it would use a leaf K that has no index when K is a power of two; the leaf is not needed.

Privacy: given what was released before, another user's trajectory does not depend on the replaced
one, so replacing user i changes the blocks that hold i and nothing else. The vector of all blocks
has sensitivities levels Delta_1 (L1) and sqrt(levels) Delta_2 (L2), with Delta those of one
contribution. The sums are functions of the noisy blocks. Laplace noise of b = levels Delta_1 /
epsilon composes adaptively to epsilon-DP. Gaussian noise by the analytic mechanism on the whole
vector is (epsilon, beta)-DP, and stays so when later contributions are chosen adaptively (Denisov
et al. 2022). Policies shown to the others are post-processing: by the billboard lemma (Hsu et al.
2014) the run is jointly DP.

`paper` is Lap(3 H ceil(log2 K) / epsilon) on three families of counters (004, section 5.1: epsilon'
= epsilon / (3 H log K)). It counts H changes a family where a replaced user makes 2 H. So it gives
2 epsilon-DP for replacing one user (epsilon for adding or removing one), and a still weaker
guarantee when all X A losses are shown (full information).

**Local Privatizer** (004, 5.2): every user adds noise to their contribution before it leaves.

    S~_t = sum_{i <= t} (sigma_i + Z_i),   Z_i independent for every user and counter,

so the noise on S_t has variance t Var Z. Privacy: one user's message is the whole noisy
contribution; two possible contributions differ by at most Delta_1 in L1 and Delta_2 in L2. Laplace
noise of b = Delta_1 / epsilon is epsilon-LDP; the analytic Gaussian mechanism is
(epsilon, beta)-LDP. A user sends once, so nothing composes. `paper` is Lap(3 H / epsilon) on three
families; it counts H changes a family where two trajectories differ in 2 H, so it is 2 epsilon-LDP.
Under joint DP the same noise on bandit losses is what 004 uses (Lemma 5.6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from riffle.common.accounting import gaussian_variance
from riffle.coordinator.learning.learner import FloatArray, LearnerError

NoiseKind = Literal["none", "laplace", "gaussian"]
NoiseLevels = Literal["paper", "tight"]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How far one user's replacement moves all counters together: L1 and L2 norms."""

    l1: float
    l2: float

    @classmethod
    def of_cells(cls, cells: int) -> Sensitivity:
        """Returns that of `cells` counters up by one and `cells` down by one."""
        return cls(2.0 * cells, math.sqrt(2.0 * cells))

    @classmethod
    def of_losses(cls, pairs: int) -> Sensitivity:
        """Returns that of `pairs` numbers in [0, 1], any of which may change."""
        return cls(float(pairs), math.sqrt(pairs))

    def __add__(self, other: Sensitivity) -> Sensitivity:
        """Returns that of two families of counters released together."""
        return Sensitivity(self.l1 + other.l1, math.hypot(self.l2, other.l2))

    def repeated(self, times: int) -> Sensitivity:
        """Returns the sensitivity when every contribution enters `times` released numbers."""
        return Sensitivity(times * self.l1, math.sqrt(times) * self.l2)


@dataclass(frozen=True, slots=True)
class AdditiveNoise:
    """Independent noise of one kind; `scale` is b of Lap(b) or sigma of N(0, sigma^2)."""

    kind: NoiseKind
    scale: float

    @property
    def variance(self) -> float:
        """Variance of one draw."""
        return {"none": 0.0, "laplace": 2.0, "gaussian": 1.0}[self.kind] * self.scale**2

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        """Draws noise of this shape."""
        if self.kind == "none":
            return np.zeros(shape)
        if self.kind == "laplace":
            return generator.laplace(0.0, self.scale, shape)
        return generator.normal(0.0, self.scale, shape)

    def deviation(self, terms: int, log_term: float) -> float:
        """Returns a bound that a sum of `terms` draws exceeds with probability <= 2 exp(-log_term).

        Gaussian: s = sigma sqrt(2 terms l). Laplace: log E exp(x Z / b) = -log(1 - x^2) is at most
        x^2 / (1 - x), so the sum is sub-gamma with variance factor 2 terms b^2 and scale b
        (Boucheron et al. 2003): s = b (2 sqrt(terms l) + l).
        """
        if self.kind == "none" or terms == 0:
            return 0.0
        if self.kind == "gaussian":
            return self.scale * math.sqrt(2.0 * terms * log_term)
        return self.scale * (2.0 * math.sqrt(terms * log_term) + log_term)


NO_NOISE = AdditiveNoise("none", 0.0)


def least_noise(sensitivity: Sensitivity, epsilon: float, beta: float) -> AdditiveNoise:
    """Returns (epsilon, beta)-DP noise, of the kind that has the smaller variance.

    Laplace noise of b = Delta_1 / epsilon is epsilon-DP (Dwork et al. 2006); the least Gaussian
    noise is that of Balle and Wang 2018, Theorem 8.
    """
    unit = gaussian_variance(epsilon, beta, 1) / 2.0
    gaussian = AdditiveNoise("gaussian", sensitivity.l2 * math.sqrt(unit))
    laplace = AdditiveNoise("laplace", sensitivity.l1 / epsilon)
    return min(laplace, gaussian, key=lambda noise: noise.variance)


def noise_of_draw(
    name: NoiseLevels, *, sensitivity: Sensitivity, H: int, depth: int, epsilon: float, beta: float
) -> AdditiveNoise:
    """Returns the noise of one draw, where a contribution of this sensitivity enters `depth` sums.

    depth is 1 for a Local Privatizer, and `tree_levels(T)`, at least 1, for T central sums.
    """
    if name == "paper":
        return AdditiveNoise("laplace", 3.0 * H * depth / epsilon)
    return least_noise(sensitivity.repeated(depth), epsilon, beta)


def paper_guarantee(sensitivity: Sensitivity, H: int, epsilon: float) -> float:
    """Returns the epsilon that `paper` really gives, central or local: Delta_1 / (3 H) epsilon.

    `sensitivity` is that of all families together: 6 H, so 2 epsilon, for three families of
    visits and rewards; 4 H + X A with losses under full information.
    """
    return sensitivity.l1 / (3.0 * H) * epsilon


def tree_levels(T: int) -> int:
    """Returns the most blocks that one of T contributions is in; 0 for an empty stream."""
    return T.bit_length()


class BinaryMechanism:
    """The Central Privatizer: T arrays of one shape; `variant` equalises the noise (Alg. 4).

    Every block's noise is drawn in full when the block is completed, in the order of t; the
    variant's further noises after it. Raises LearnerError past T contributions.
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
        """Takes contribution t = 1..T; returns S_t with noise."""
        if self._t == self.T:
            raise LearnerError(f"this Binary Mechanism was made for {self.T} contributions")
        self._t += 1
        self._total += sigma
        # The block that t completes is that of its lowest 1-bit; it swallows those below it.
        completed = (self._t & -self._t).bit_length() - 1
        self._blocks[:completed] = 0.0
        self._blocks[completed] = self.noise.draw(self._generator, self._total.shape)
        released: FloatArray = self._total + self._blocks.sum(axis=0)
        for _ in range(self.terms(self._t) - self._t.bit_count()):
            released += self.noise.draw(self._generator, self._total.shape)
        return released

    def terms(self, t: int) -> int:
        """Returns the number of noises in S_t."""
        return tree_levels(self.T) if self.variant and t > 0 else t.bit_count()


class LocalPrivatizer:
    """The Local Privatizer: arrays of one shape, each made private by its user."""

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
        """Adds the next user's message to the sum, which it returns."""
        self._total += self.privatize(sigma)
        return self._total.copy()

    def terms(self, t: int) -> int:
        """Returns the number of noises in S_t."""
        return t
