"""UCBVI and private UCB-VI in plain NumPy: the oracle of the compiled loops.

`coordinator.learning.ucbvi` repeats this arithmetic in the same order; tests hold the two equal,
policy by policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from riffle.common.mechanism.counters import CounterLayout, Episode, Sizes
from riffle.coordinator.learning.learner import BatchCounts, FloatArray, PolicyArray, batch_counts
from riffle.coordinator.learning.postprocess import ConsistentCounts, consistent
from riffle.coordinator.learning.privatizers import (
    AdditiveNoise,
    BinaryMechanism,
    LocalPrivatizer,
)
from riffle.coordinator.learning.ucbvi_parameters import Bonus, Trust, log_terms

Privatizer = BinaryMechanism | LocalPrivatizer


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


def expectation(P: FloatArray, V: FloatArray) -> FloatArray:
    """P V for rows P (X, A, X), added in the order of x', as the compiled loops do."""
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
        self.K, self.delta = K, delta
        self.iota, self.azar, self.qiao = log_terms(sizes, K, delta)
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
            return np.asarray(7.0 * H * self.azar / np.sqrt(N))
        sampling = bernstein(model, h, V, PV, H - h, self.iota)
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
    N = np.maximum(visits, least_visits * math.sqrt(counts.visit_variance.max()))
    rewards = np.zeros_like(N) if counts.rewards is None else counts.rewards
    P, r = np.zeros_like(consistent.transitions), np.zeros_like(N)
    np.divide(consistent.transitions, visits[..., None], out=P, where=visits[..., None] > 0)
    np.divide(rewards, N, out=r, where=N > 0)
    return Estimates(
        P=P,
        r=np.clip(r, 0.0, 1.0),
        N=N,
        transition_variance=float(counts.transition_variance.max()),
        reward_variance=float(counts.reward_variance.max()),
        E=E,
    )


def privatizer_of(
    trust: Trust,
    noise: AdditiveNoise,
    layout: CounterLayout,
    K: int,
    generator: np.random.Generator,
) -> Privatizer:
    """The Privatizer of a run of K episodes."""
    shape = (layout.counters,)
    if trust == "local":
        return LocalPrivatizer(shape, noise, generator)
    return BinaryMechanism(K - 1, shape, noise, generator)


def precision(privatizer: Privatizer, t: int, *, counters: int, times: int, delta: float) -> float:
    """Returns E of Assumption 4 after t contributions.

    Used at each of `times` moments, it bounds all noises of all `counters` by E / 4 together with
    probability 1 - delta.
    """
    log_term = math.log(2.0 * counters * times / delta)
    return 4.0 * privatizer.noise.deviation(privatizer.terms(t), log_term)


class PrivateUCBVI(UCBVI):
    """One run of private UCB-VI; `layout` and `privatizer` belong together."""

    def __init__(
        self,
        sizes: Sizes,
        K: int,
        layout: CounterLayout,
        privatizer: Privatizer,
        delta: float = 0.05,
        bonus: Bonus | None = None,
    ) -> None:
        super().__init__(sizes, K, delta, bonus)
        self.layout = layout
        self.privatizer = privatizer
        self._counts = np.zeros(layout.counters)

    def observe(self, episode: Episode) -> None:
        """Take one user's contribution through the Privatizer; the last user's is not needed."""
        self.episodes += 1
        if self.episodes < self.K:
            self._counts = self.privatizer.add(contribution(self.layout, episode))

    def estimates(self) -> Estimates:
        """P~, r~, N~ of the private counts so far."""
        t = min(self.episodes, self.K - 1)
        if t == 0:
            return super().estimates()
        variance = self.privatizer.terms(t) * self.privatizer.noise.variance
        counts = batch_counts(self.layout, t, self._counts, variance)
        E = self._precision(t)
        literal = self.bonus.name == "paper"
        projected = consistent(
            counts.transitions, counts.visits, E if literal else 0.0, add_on=literal
        )
        return estimates(projected, counts, E, 0.0 if literal else self.bonus.least_visits)

    def exploration(self, model: Estimates, h: int, V: FloatArray, PV: FloatArray) -> FloatArray:
        """The bonus b_h (X, A)."""
        if self.bonus.name == "paper":
            return self._literal(model, h, V, PV)
        squares = np.zeros_like(PV)
        for then in V:
            squares = squares + (then - PV) ** 2
        noise = model.transition_variance * squares + model.reward_variance
        scaled = self.bonus.noise_scale * np.sqrt(self.iota * noise)
        sampling = super().exploration(model, h, V, PV)
        return np.asarray(sampling + scaled / np.maximum(model.N[h], 1.0))

    def _literal(self, model: Estimates, h: int, V: FloatArray, PV: FloatArray) -> FloatArray:
        X, H = self.sizes.X, self.sizes.H
        width = self.qiao / np.maximum(model.N[h], 1.0)
        shift = 20.0 * H * (model.E * X) * width
        b = 2.0 * np.sqrt(spread(model.P[h], V, PV) * width) + np.sqrt(2.0 * width)
        return np.asarray(b + shift + 4.0 * H * np.sqrt(width))

    def _precision(self, t: int) -> float:
        if self.bonus.name != "paper":
            return 0.0
        counters = self.layout.counters
        return precision(self.privatizer, t, counters=counters, times=self.K, delta=self.delta)
