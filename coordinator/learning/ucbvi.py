"""UCBVI (Azar, Osband, Munos 2017): optimistic backward induction before every episode.

The baseline of 000, section VI, not private. Counts N_h(x, a, x'), N_h(x, a), R_h(x, a) of all
episodes so far give P^ and r^; with V_H = 0, for h = H-1..0,

    Q_h(x, a) = min(H - h, r^ + P^ V_{h+1} + b_h(x, a)),   V_h(x) = max_a Q_h(x, a),

and Q = H - h for a pair never visited. The policy is greedy in Q, the first action winning ties. Q
is computed afresh (the monotone min with the Q before is left out: with noisy counts one
under-estimate would stay for ever, and the learners are to differ in their counts only).

Two bonuses by name, the same for every environment, recorded with every result:

- `paper`: 7 H L / sqrt(N), L = log(5 X A K H / delta) (UCBVI-CH). It exceeds H - h for N < 49 L^2,
  some ten thousand visits, so nothing is learned at K = 20,000.
- `practical`: Bernstein's, with variances taken as estimated, times one declared constant:

    b = bonus_scale (sqrt(iota (Var_{P^} V_{h+1} + r^ (1 - r^)) / N) + iota (H - h) / N),

  iota = log(2 H X A K / delta). Private learners add what their noise can do, see `private_ucbvi`.

This is the readable reference; `experiments.compiled.ucbvi` holds the same arithmetic in the same
order, compiled, and tests hold the two equal.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from riffle.common.mechanism.counters import CounterLayout, Episode, Sizes
from riffle.coordinator.learning.learner import BatchCounts, FloatArray, PolicyArray, batch_counts
from riffle.coordinator.learning.postprocess import ConsistentCounts

BonusName = Literal["paper", "practical"]


@dataclass(frozen=True, slots=True)
class Bonus:
    """Which bonus, and its constants; all but the name belong to `practical`.

    bonus_scale multiplies the sampling bonus, noise_scale that of the privacy noise. A pair counts
    as visited at least least_visits standard deviations of its visit count's noise, in r~ and in
    the bonuses (P~ stays the ratio of counts): a pair hardly visited does not look rewarding by
    noise alone. The defaults were chosen once from small grids at K = 20,000 and 200,000,
    epsilon = 1, on RiverSwim-v0, Bandit-v0, SpectrumAccess-v0 and two RandomMDP-v0, a few seeds
    each, and are the same for all environments, learners and epsilon.
    """

    name: BonusName = "practical"
    bonus_scale: float = 0.1
    noise_scale: float = 0.01
    least_visits: float = 1.0

    def as_dict(self) -> dict[str, str | float]:
        """Fields by name, to be recorded in every result."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Estimates:
    """P^ (H, X, A, X), r^ (H, X, A) and the visits N (H, X, A) behind them.

    Noise levels of the counts, zero without privacy: the variances of a transition count and of a
    reward sum, and the E of Assumption 4.
    """

    P: FloatArray
    r: FloatArray
    N: FloatArray
    transition_variance: float = 0.0
    reward_variance: float = 0.0
    E: float = 0.0


@dataclass(frozen=True, slots=True)
class Confidence:
    """The logarithms of the bonuses, for a run of K episodes with failure probability delta."""

    sizes: Sizes
    K: int
    delta: float

    @property
    def iota(self) -> float:
        """log(2 H X A K / delta)."""
        X, A, H = self.sizes.X, self.sizes.A, self.sizes.H
        return math.log(2 * H * X * A * self.K / self.delta)

    @property
    def azar(self) -> float:
        """L = log(5 X A K H / delta) of UCBVI-CH."""
        X, A, H = self.sizes.X, self.sizes.A, self.sizes.H
        return math.log(5 * X * A * self.K * H / self.delta)

    @property
    def qiao(self) -> float:
        """iota = log(30 H X A T / delta) of DP-UCBVI, T = K H."""
        X, A, H = self.sizes.X, self.sizes.A, self.sizes.H
        return math.log(30 * H * X * A * self.K * H / self.delta)


def expectation(P: FloatArray, V: FloatArray) -> FloatArray:
    """P V for rows P (X, A, X), added in the order of x' (which the compiled kernels repeat)."""
    total: FloatArray = P[..., 0] * V[0]
    for y in range(1, len(V)):
        total = total + P[..., y] * V[y]
    return total


class UCBVI:
    """One run of UCBVI: `policy` before an episode, `observe` after it.

    Shapes as in `learner`. Raises nothing; sizes are those of the episodes it is given.
    """

    def __init__(
        self, sizes: Sizes, K: int, delta: float = 0.05, bonus: Bonus | None = None
    ) -> None:
        self.sizes = sizes
        self.bonus = bonus or Bonus()
        self.confidence = Confidence(sizes, K, delta)
        self.layout = CounterLayout(sizes, "lean")
        self.episodes = 0
        self._counts = np.zeros(self.layout.counters)

    def policy(self) -> PolicyArray:
        """The optimistic policy (H, X) for the next episode."""
        return self.optimistic(self.estimates())

    def observe(self, episode: Episode) -> None:
        """Count one episode."""
        self.episodes += 1
        self._counts += contribution(self.layout, episode)

    def estimates(self) -> Estimates:
        """P^, r^, N of the episodes so far."""
        counts = batch_counts(self.layout, self.episodes, self._counts, 0.0)
        return estimates(ConsistentCounts(counts.transitions, counts.visits), counts)

    def optimistic(self, model: Estimates) -> PolicyArray:
        """Backward induction with bonuses."""
        X, H = self.sizes.X, self.sizes.H
        policy = np.empty((H, X), dtype=np.int64)
        V = np.zeros(X)
        for h in reversed(range(H)):
            PV = expectation(model.P[h], V)
            Q = model.r[h] + PV + self.exploration(model, h, V, PV)
            Q = np.where(model.N[h] >= 1.0, np.minimum(Q, H - h), H - h)
            policy[h], V = Q.argmax(axis=-1), Q.max(axis=-1)
        return policy

    def exploration(self, model: Estimates, h: int, V: FloatArray, PV: FloatArray) -> FloatArray:
        """The bonus b_h (X, A)."""
        H = self.sizes.H
        N = np.maximum(model.N[h], 1.0)
        if self.bonus.name == "paper":
            return np.asarray(7.0 * H * self.confidence.azar / np.sqrt(N))
        sampling = bernstein(model, h, V, PV, H - h, self.confidence.iota)
        return np.asarray(self.bonus.bonus_scale * sampling)


def bernstein(
    model: Estimates, h: int, V: FloatArray, PV: FloatArray, most: float, iota: float
) -> FloatArray:
    """sqrt(iota (Var V + r (1 - r)) / N) + iota most / N, for (X, A)."""
    r, width = model.r[h], iota / np.maximum(model.N[h], 1.0)
    variance = spread(model.P[h], V, PV) + r * (1.0 - r)
    return np.asarray(np.sqrt(variance * width) + most * width)


def spread(P: FloatArray, V: FloatArray, PV: FloatArray) -> FloatArray:
    """Variance of V under rows P (X, A, X), given P V."""
    return np.maximum(expectation(P, V * V) - PV * PV, 0.0)


def contribution(layout: CounterLayout, episode: Episode) -> FloatArray:
    """What one user adds to the counters (C,): ones where the episode went."""
    sigma = np.zeros(layout.counters)
    sigma[layout.encode(episode)] = 1.0
    return sigma


def estimates(
    consistent: ConsistentCounts,
    counts: BatchCounts,
    E: float = 0.0,
    least_visits: float = 0.0,
) -> Estimates:
    """P^ = N(x,a,x') / N(x,a) and r^ = clip(R / N, 0, 1); both zero without visits."""
    visits = consistent.visits
    N = np.maximum(visits, least_visits * math.sqrt(counts.visit_variance))
    rewards = np.zeros_like(N) if counts.rewards is None else counts.rewards
    P, r = np.zeros_like(consistent.transitions), np.zeros_like(N)
    np.divide(consistent.transitions, visits[..., None], out=P, where=visits[..., None] > 0)
    np.divide(rewards, N, out=r, where=N > 0)
    return Estimates(
        P=P,
        r=np.clip(r, 0.0, 1.0),
        N=N,
        transition_variance=counts.transition_variance,
        reward_variance=counts.reward_variance,
        E=E,
    )
