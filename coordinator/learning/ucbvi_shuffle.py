"""UCBVI in batches: optimistic policies from the private counts of a few batches of users.

UCBVI plans before every episode, but the shuffle model hides users in batches. So the n_i users of
batch i run policies that are planned from the batches before i, with several bonus scales:

    n_1 = first sigma X A,  mixture_1 = uniform over random policies
    for batch i = 1, 2, ..., while batches fit in (1 - exploit_share) K episodes:
        run n_i episodes of mixture_i; estimate P^, r^, N from the counts of batches 1..i
        for each scale c:
            for h = H-1 .. 0:  Q_h = min(H - h, r^ + P^ V_{h+1} + c decay^(i-1) b_h)
                               V_h = max_a Q_h,  pi_c(h, .) = argmax_a Q_h
        mixture_{i+1} = uniform over the pi_c,  n_{i+1} = growth n_i
    run the remaining episodes with the policy without bonus

Here V_H = 0, and sigma is the standard deviation of the noise on a visit count. All sizes are then
multiplied by one factor, so that the batches fill (1 - exploit_share) K episodes.

**Counts.** Each batch's counts are projected on the equations of flow, and added with the weights
`visits` of `evidence`. Eq. 7 of 000 then makes the sums of transitions and of visits agree. Let s
be the standard deviation of the noise on the visits to (h, x, a). The transitions from (h, x, a)
get `shrinkage` * s pseudo-visits, spread like the counts of (x, a) in all steps together
(`evidence.shrink_rows`). While the counts of a step are below the noise, its estimate is close to
the average of all steps. If all steps are declared alike, counts are summed over steps instead.

**Bonus.** v_T is the variance of the noise on a weighted sum of transition counts. v_R is the
variance of the noise on a weighted sum of rewards. N is the number of visits and pseudo-visits, or
max(s, 1) if that is larger:

    b_h(x, a) = sqrt(sum_x' v_T (V_{h+1}(x') - P^ V_{h+1})^2 + v_R) / N + sqrt(1 / (4 N)).

The first term of b_h is the standard deviation of the noise in r^ + P^ V_{h+1}. The second term is
the largest possible standard deviation of a mean of N reward bits. Nothing is proved about regret:
b_h is not a confidence bound, and shrinkage is biased if steps differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import generator_for
from riffle.coordinator.learning import evidence
from riffle.coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    FloatArray,
    LearnerError,
    LearnerSummary,
    PolicyArray,
    Problem,
)
from riffle.coordinator.learning.planning import Model, Plan, plan
from riffle.coordinator.learning.postprocess import estimate_rewards

SCALES = (0.0, 0.1, 0.4, 1.5)
"""The bonus scales c of a mixture's policies."""
EXPLORERS = 64
"""The number of random policies in the first mixture."""


@dataclass(frozen=True, slots=True)
class Options:
    """A run's constants (see the module). The defaults serve every environment, K and epsilon."""

    first: float = 1.5
    growth: float = 1.45
    exploit_share: float = 0.55
    decay: float = 0.85
    shrinkage: float = 1.5
    smallest_n: int = 64

    def __post_init__(self) -> None:
        if not (self.first > 0 and self.growth >= 1 and 0 <= self.exploit_share < 1):
            raise ValueError("first must be above 0, growth at least 1, exploit_share in [0, 1)")
        if not (0 < self.decay <= 1 and self.shrinkage >= 0 and self.smallest_n >= 1):
            raise ValueError("decay must be in (0, 1], shrinkage at least 0, smallest_n above 0")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A model, its visits N (H, X, A), and the variances of the noise behind the model.

    `v_T` (H, X, A, X) is the variance on transition counts, and `v_R` (H, X, A) on reward sums.
    """

    model: Model
    N: FloatArray
    v_T: FloatArray
    v_R: FloatArray

    def optimistic(self, c: float) -> PolicyArray:
        """Plans with c times the bonus. Returns the greedy policy; the first action wins ties."""
        (P, r), H = self.model, len(self.N)
        policy, V = np.zeros(r.shape[:2], dtype=np.int64), np.zeros(r.shape[1])
        for h in reversed(range(H)):
            PV = P[h] @ V
            spread = (self.v_T[h] * (V - PV[..., None]) ** 2).sum(axis=-1)
            bonus = np.sqrt(spread + self.v_R[h]) / self.N[h]
            bonus += np.sqrt(0.25 / self.N[h])
            Q = np.minimum(r[h] + PV + c * bonus, H - h)
            policy[h], V = Q.argmax(axis=-1), Q.max(axis=-1)
        return policy


class UCBVIShuffle:
    """A `Learner`; see the module's docstring.

    Raises LearnerError if K is too small for one batch. Raises the error of ``problem.noise`` if
    the noise of a batch cannot be made.
    """

    def __init__(self, problem: Problem, options: Options | None = None) -> None:
        self.problem, self.options = problem, options or Options()
        self.sizes = batch_sizes(problem, self.options)
        X, A, H = problem.sizes.X, problem.sizes.A, problem.sizes.H
        generator = generator_for(problem.seed, "explorers")
        self._mixture = _uniform(list(generator.integers(A, size=(EXPLORERS, H, X))))
        self._batches: list[evidence.Evidence] = []
        self._model: Model | None = None
        self._best = Plan(np.zeros((H, X), dtype=np.int64), np.zeros(()))
        self._used = 0
        for n, layer in self.batches:
            problem.noise(n, layer)

    @property
    def batches(self) -> set[tuple[int, int | None]]:
        """The sizes of all batches, each with the step that it counts, or None for all steps."""
        exploit = self.problem.K - sum(self.sizes)
        return {(n, None) for n in self.sizes} | ({(exploit, 0)} if exploit else set())

    def next_deployment(self) -> Deployment | None:
        """Returns the next batch, or None once K episodes have been observed."""
        i = len(self._batches)
        if i < len(self.sizes):
            return Deployment(i + 1, "fine", self._mixture, self.sizes[i], None)
        if left := self.problem.K - self._used:
            return Deployment(i + 1, "exploit", Mixture.single(self._best.policy), left, 0)
        return None

    def observe(self, counts: BatchCounts) -> None:
        """Adds a batch's counts and plans the next mixture. Returns None: there are no stages."""
        asked = self.next_deployment()
        if asked is None or (asked.n, asked.layer) != (counts.n, counts.layout.layer):
            raise LearnerError(f"asked for {asked}, got counts of {counts.n} of {counts.layout}")
        self._used += counts.n
        if asked.purpose == "exploit":
            return
        self._batches.append(evidence.evidence_of([counts], [asked.mixture]).conserve_flow())
        estimate = self._estimate()
        self._model = estimate.model
        self._best = plan(*estimate.model, self.problem.d1)
        scale = self.options.decay ** (len(self._batches) - 1)
        self._mixture = _uniform([estimate.optimistic(c * scale) for c in SCALES])

    def _estimate(self) -> Estimate:
        weights = [np.ones(batch.visits.shape) for batch in self._batches]
        if self._model is not None:
            weights = list(evidence.visit_weights(self._batches, self._model.P, self.problem.d1))
        alike = self.problem.homogeneous
        sums = evidence.pool(self._batches, weights, alike=alike)
        N = sums.consistent(0.0, add_on=False)
        R, v_R = self._rewards(weights)
        s = np.sqrt(sums.visit_variance) + 1e-3  # above zero even without noise
        T, visits = N.transitions, N.visits
        if not alike:
            k = self.options.shrinkage * s
            T = evidence.shrink_rows(T, k, sums.possible)
            R, visits = evidence.shrink_rewards(R, visits, k, s), visits + k
        P = T / np.maximum(T.sum(axis=-1, keepdims=True), 1e-9)
        least = np.maximum(visits, np.maximum(s, 1.0))
        shape = (self.problem.sizes.H, *visits.shape[1:])
        every_step = (*shape, shape[1])
        return Estimate(
            Model(
                np.broadcast_to(P, every_step), np.broadcast_to(estimate_rewards(R, least), shape)
            ),
            np.broadcast_to(least, shape),
            np.broadcast_to(sums.transition_variance, every_step),
            np.broadcast_to(v_R, shape),
        )

    def _rewards(self, weights: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
        """Returns the weighted sum of rewards and the variance of its noise, both (steps, X, A)."""
        w = np.stack(weights)
        counted = np.stack([batch.rewards for batch in self._batches if batch.rewards is not None])
        variances = np.stack([batch.reward_variance for batch in self._batches])
        R, v_R = (w * counted).sum(axis=0), (variances * w**2).sum(axis=0)
        if self.problem.homogeneous:
            return R.sum(axis=0, keepdims=True), v_R.sum(axis=0, keepdims=True)
        return R, v_R

    def summary(self) -> LearnerSummary:
        """Returns the best policy of the current model."""
        return LearnerSummary(
            policy=self._best.policy,
            value_estimate=float(self._best.value),
            active=None,
            stage=len(self._batches),
            episodes_used=self._used,
            episodes_total=self.problem.K,
            finished=self._used == self.problem.K,
            constants=asdict(self.options),
        )


def batch_sizes(problem: Problem, options: Options) -> list[int]:
    """Returns the batch sizes n_1, n_2, ..., which together fill (1 - exploit_share) K episodes.

    Raises LearnerError if K leaves too few episodes for one batch.
    """
    K, possible = problem.K, problem.layout(None).possible
    pairs = np.count_nonzero(possible.any(axis=-1))  # (h, x, a) that can occur
    successors = np.count_nonzero(possible) / pairs
    episodes = K - int(K * options.exploit_share)
    if episodes < options.smallest_n:
        raise LearnerError(
            f"K={K} leaves {episodes} episodes to learn from, but a batch takes "
            f"smallest_n={options.smallest_n}. Raise K."
        )
    # A visit count is a sum over x' (and r) of counters, or a counter itself.
    terms = {"joint": 2 * successors, "lean": successors, "paper": 1}[problem.families]
    sigma = math.sqrt(terms * problem.noise(max(episodes // 4, options.smallest_n), None))
    least = max(options.smallest_n, math.ceil(options.first * sigma * pairs / problem.sizes.H))
    lengths, total = [1.0], 1.0
    while least * (total + (longer := options.growth ** len(lengths))) <= episodes:
        lengths.append(longer)
        total += longer
    sizes = [round(episodes * length / total) for length in lengths[:-1]]
    return [*sizes, episodes - sum(sizes)]


def _uniform(policies: Sequence[PolicyArray]) -> Mixture:
    return Mixture.from_probabilities(np.stack(policies), np.ones(len(policies)))
