"""A model of the absorbing MDP from private counts, and which counts it is made from.

Raw counts -> Eq. 7 -> P~ and r~ (000, Eq. 3), in one function that also takes stacks of counts, so
that the parametric bootstrap runs the very estimator it judges. The document uses the fine batch of
the stage only; pooling adds its crude batches, memory those of earlier stages. Batches i are added
with weights w_i, in one of two ways (m_i visits of a typical or of this very (h, x, a), sigma_i^2
the variance of the noise on a transition count):

    batch:   w_i = m / (m + sigma_i^2),            m = n_i / (X A);
    visits:  w_i(h,x,a) = m / (m + X sigma_i^2),   m = n_i d_i(h,x,a), the visits that the batch's
             own mixture pays to (h, x, a) under a first model of the transitions.

Both are the share of sampling in a count's variance: near one where visits abound, about
m / sigma^2 (the matched filter) where they are lost in noise. With `visits` a batch that never goes
to (h, x, a) adds no noise there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from riffle.common.mechanism.policy import Mixture
from riffle.coordinator.learning.learner import BatchCounts, FloatArray
from riffle.coordinator.learning.planning import (
    BoolArray,
    estimate_rewards,
    estimate_transition,
    occupancy,
)
from riffle.coordinator.learning.postprocess import ConsistentCounts, consistent
from riffle.coordinator.learning.sdp_pe.enumeration import Model
from riffle.coordinator.learning.sdp_pe.flow import conserve, conserve_total

Weights = Sequence[FloatArray]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Unbiased counts of a batch (or of one a layer): (..., Hs, X, A, X), (..., Hs, X, A) twice.

    `rewards` is None when they were not counted; n is the number of episodes behind each step. The
    variances are those of the noise on one entry. `mixtures` are what was deployed: one for all
    steps, or one a step.
    """

    n: float
    transitions: FloatArray
    visits: FloatArray
    rewards: FloatArray | None
    transition_variance: float
    visit_variance: float
    reward_variance: float
    mixtures: tuple[Mixture, ...] = ()

    @property
    def weight(self) -> float:
        """The weight `batch`, see the module's docstring."""
        X, A = self.transitions.shape[-3:-1]
        return self.n / (self.n + int(X) * int(A) * self.transition_variance)

    def step(self, h: int) -> Evidence:
        """The counts of step h alone, Hs = 1."""
        return replace(
            self,
            transitions=self.transitions[..., h : h + 1, :, :, :],
            visits=self.visits[..., h : h + 1, :, :],
            rewards=None if self.rewards is None else self.rewards[..., h : h + 1, :, :],
        )

    def conserved(self) -> Evidence:
        """The same with flow-consistent counts, see `flow`; visits are then sums.

        The variances stay those of the counts as they came, which is on the safe side.
        """
        shared = self.visit_variance == self.transition_variance * self.transitions.shape[-1]
        if len(self.mixtures) > 1:
            N = conserve_total(self.transitions, self.n)
        elif shared:
            N = conserve(self.transitions, self.n)
        else:
            ratio = self.transition_variance / self.visit_variance
            N = conserve(self.transitions, self.n, visits=self.visits, ratio=ratio)
        return replace(self, transitions=N, visits=N.sum(axis=-1))

    def expected(self, P: FloatArray, d1: FloatArray) -> FloatArray:
        """n d(h, x, a) of the steps counted, (Hs, X, A), under P (H, X, A, X)."""
        d = [
            mixture.probabilities @ _flat(occupancy(P, d1, mixture.policies))
            for mixture in self.mixtures
        ]
        if len(d) == 1:
            return np.asarray(self.n * d[0].reshape(P.shape[:-1])[: self.transitions.shape[-4]])
        steps = np.stack([row.reshape(P.shape[:-1])[h] for h, row in enumerate(d)])
        return np.asarray(self.n * steps)


def of_batches(batches: Sequence[BatchCounts], mixtures: Sequence[Mixture]) -> Evidence:
    """Evidence of one batch, or of one-layer batches stacked; sizes may differ by one."""
    rewards = [batch.rewards for batch in batches if batch.rewards is not None]
    return Evidence(
        float(np.mean([batch.n for batch in batches])),
        np.concatenate([batch.transitions for batch in batches]),
        np.concatenate([batch.visits for batch in batches]),
        np.concatenate(rewards) if len(rewards) == len(batches) else None,
        max(batch.transition_variance for batch in batches),
        max(batch.visit_variance for batch in batches),
        max(batch.reward_variance for batch in batches),
        tuple(mixtures),
    )


def batch_weights(parts: Sequence[Evidence]) -> Weights:
    """One weight a batch; one batch alone keeps weight one, so that E stays in counts."""
    if len(parts) == 1:
        return (np.ones(()),)
    return tuple(np.asarray(part.weight) for part in parts)


def visit_weights(parts: Sequence[Evidence], P: FloatArray, d1: FloatArray) -> Weights:
    """One weight (Hs, X, A) a batch, for every (h, x, a) on its own."""
    return tuple(_share(part, part.expected(P, d1)) for part in parts)


def _share(part: Evidence, m: FloatArray) -> FloatArray:
    noise = m.shape[-2] * part.transition_variance
    return np.asarray(np.divide(m, m + noise, out=np.zeros_like(m), where=m > 0))


@dataclass(frozen=True, slots=True)
class Counts:
    """A weighted sum of evidence; the variances are those of the noise on an entry of each."""

    transitions: FloatArray
    visits: FloatArray
    transition_variance: FloatArray
    visit_variance: FloatArray

    def consistent(self, E: float, *, add_on: bool) -> ConsistentCounts:
        """Eq. 7 and the add-on, with E in (weighted) counts."""
        return consistent(self.transitions, self.visits, E, add_on=add_on)


def pooled(parts: Sequence[Evidence], weights: Weights, *, alike: bool = False) -> Counts:
    """The weighted sum; with `alike` over steps too (Hs = 1), for time-homogeneous environments."""
    pairs = list(zip(weights, parts, strict=True))
    return Counts(
        _sum([w[..., None] * part.transitions for w, part in pairs], 4, alike),
        _sum([w * part.visits for w, part in pairs], 3, alike),
        _sum([_each(w**2 * part.transition_variance, part) for w, part in pairs], 3, alike),
        _sum([_each(w**2 * part.visit_variance, part) for w, part in pairs], 3, alike),
    )


def _each(value: FloatArray, part: Evidence) -> FloatArray:
    return np.broadcast_to(value, part.transitions.shape[-4:-1])


def _sum(terms: Sequence[FloatArray], axes: int, alike: bool) -> FloatArray:
    if alike:
        terms = [term.sum(axis=-axes, keepdims=True) for term in terms]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@dataclass(frozen=True, slots=True)
class Estimator:
    """The choices of estimation, fixed before the counts are seen.

    H is the horizon; W (H or 1, X, A, X) goes to x-dagger; E is the tolerance of Eq. 7 in counts;
    `add_on` as in `Constants`; a reward sum is divided by at least `least_visits` standard
    deviations of a visit count's noise, so that a pair hardly visited does not seem rewarding by
    noise alone (0: literal Eq. 3); `weights` as many as there are parts; `alike` sums over steps;
    `flow` makes counts flow-consistent first.
    """

    H: int
    W: BoolArray
    E: float
    add_on: bool
    least_visits: float
    weights: Weights
    alike: bool = False
    flow: bool = False

    def model(self, parts: Sequence[Evidence]) -> Model:
        """P~ and r~ of the absorbing MDP, for one set of counts or a stack of them."""
        if self.flow:
            parts = [part.conserved() for part in parts]
        counts = pooled(parts, self.weights, alike=self.alike).consistent(
            self.E, add_on=self.add_on
        )
        P = estimate_transition(counts.transitions, self.W)
        r = self._rewards(parts)
        return Model(_every_step(P, self.H, 4), _every_step(r, self.H, 3))

    def _rewards(self, parts: Sequence[Evidence]) -> FloatArray:
        pairs = [
            (w, part)
            for w, part in zip(self.weights, parts, strict=True)
            if part.rewards is not None
        ]
        weights = tuple(w for w, _ in pairs)
        counts = pooled([part for _, part in pairs], weights, alike=self.alike)
        N = counts.consistent(self.E, add_on=self.add_on).visits
        R = _sum([w * part.rewards for w, part in pairs if part.rewards is not None], 3, self.alike)
        return estimate_rewards(
            R, np.maximum(N, self.least_visits * np.sqrt(counts.visit_variance))
        )


def _flat(d: FloatArray) -> FloatArray:
    return d.reshape(len(d), -1)


def _every_step(array: FloatArray, H: int, axes: int) -> FloatArray:
    """Repeat the layer axis, `axes` from the end, H times when it was summed to one."""
    return np.broadcast_to(array, (*array.shape[:-axes], H, *array.shape[-axes + 1 :]))
