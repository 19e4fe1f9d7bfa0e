"""Central Privatizer: the Binary Mechanism (Chan, Shi, Song 2011) and its variant (004, Alg. 4).

A trusted agent sees every contribution and releases S_t for t = 1..T. The dyadic block of level j
ends at multiples of 2^j; S_t is the sum of the blocks named by the 1-bits of t:

    t = 2^{j_1} + 2^{j_2} + ... (j_1 > j_2 > ...),   S_t = block_{j_1} + block_{j_2} + ...,

and each block gets noise once, when it is completed. So S_t carries popcount(t) noises. The variant
adds fresh noises up to the number of levels: the noise on S_t is then identically distributed for
all t (Assumption 3.2 of 004), which costs variance and gives no privacy.

Levels, exactly. Contribution i is in one block a level, for the levels with 2^j <= T, at most

    levels(T) = floor(log2 T) + 1 = T.bit_length(),

reached by i = 1. A learner of K episodes needs S_1..S_{K-1} (policy k uses users i < k; nobody uses
S_K), hence T = K - 1 and (K-1).bit_length() = ceil(log2 K) levels: what Algorithm 4 counts. Read
literally it would use a leaf K that has no index when K is a power of two; the leaf is not needed.

Privacy. Given what was released before, another user's trajectory does not depend on the replaced
one, so replacing user i changes the blocks that hold i and nothing else: the vector of all blocks
has sensitivities levels Delta_1 (L1) and sqrt(levels) Delta_2 (L2), with Delta those of one
contribution. The sums are functions of the noisy blocks. Laplace noise of b = levels Delta_1 /
epsilon composes adaptively to epsilon-DP; Gaussian noise by the analytic mechanism on the whole
vector is (epsilon, beta)-DP, and stays so when later contributions are chosen adaptively (Denisov
et al. 2022). Policies shown to the others are post-processing: by the billboard lemma (Hsu et al.
2014) the run is jointly DP. `tight` is the smaller of the two noises.

`paper` is Lap(3 H ceil(log2 K) / epsilon) on three families of counters (004, section 5.1:
epsilon' = epsilon / (3 H log K)). It counts H changes a family where a replaced user makes 2 H, so
it gives 2 epsilon-DP for replacing one user (epsilon for adding or removing one). When all X A
losses are shown (full information), it gives less still: see `paper_guarantee`.
"""

from __future__ import annotations

import numpy as np

from riffle.coordinator.learning.learner import FloatArray, LearnerError
from riffle.coordinator.learning.privatizers.interface import (
    AdditiveNoise,
    NoiseLevels,
    Sensitivity,
    least,
)


def levels(T: int) -> int:
    """Most blocks that one of T contributions is in; 0 for an empty stream."""
    return T.bit_length()


def central_noise(
    name: NoiseLevels,
    *,
    sensitivity: Sensitivity,
    H: int,
    T: int,
    epsilon: float,
    beta: float,
) -> AdditiveNoise:
    """Noise of one block, for T released sums of contributions of this sensitivity."""
    depth = max(levels(T), 1)
    if name == "paper":
        return AdditiveNoise("laplace", 3.0 * H * depth / epsilon)
    return least(sensitivity.repeated(depth), epsilon, beta)


def paper_guarantee(sensitivity: Sensitivity, H: int, epsilon: float) -> float:
    """The epsilon that the `paper` noise really gives, central or local: Delta_1 / (3 H) epsilon.

    `sensitivity` is that of all families together: 6 H, so 2 epsilon, for three families of
    visits and rewards; 4 H + X A with losses under full information.
    """
    return sensitivity.l1 / (3.0 * H) * epsilon


class BinaryMechanism:
    """Private running sums of T arrays of one shape; `variant` equalises the noise (Alg. 4).

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
        self._blocks = np.zeros((levels(T), *shape))
        self._t = 0

    def add(self, sigma: FloatArray) -> FloatArray:
        """Take contribution t = 1..T; return S_t with noise."""
        if self._t == self.T:
            raise LearnerError(f"this Binary Mechanism was made for {self.T} contributions")
        self._t += 1
        self._total += sigma
        # The block that t completes is that of its lowest 1-bit; it swallows those below it.
        completed = (self._t & -self._t).bit_length() - 1
        self._blocks[:completed] = 0.0
        self._blocks[completed] = self.noise.draw(self._generator, self._total.shape)
        released: FloatArray = self._total + self._blocks.sum(axis=0)
        for _ in range(self._fresh(self._t)):
            released += self.noise.draw(self._generator, self._total.shape)
        return released

    def terms(self, t: int) -> int:
        """Number of noises in S_t."""
        return levels(self.T) if self.variant and t > 0 else t.bit_count()

    def variance(self, t: int) -> float:
        """Variance of the noise on one counter of S_t."""
        return self.terms(t) * self.noise.variance

    def deviation(self, t: int, log_term: float) -> float:
        """Bound on the noise of S_t, exceeded with probability at most 2 exp(-log_term)."""
        return self.noise.deviation(self.terms(t), log_term)

    def _fresh(self, t: int) -> int:
        return self.terms(t) - t.bit_count()
