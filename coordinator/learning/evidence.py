"""Adds up the weighted counts of several batches. A model is estimated from the sum.

Batch i has n_i episodes, and noise of variance sigma_i^2 on each transition count. There are two
rules for the batch's weight w_i. They use the expected number of visits m:

    batch:   w_i = m / (m + sigma_i^2),            m = n_i / (X A), an average over (x, a);
    visits:  w_i(h,x,a) = m / (m + k sigma_i^2),   m = n_i d_i(h,x,a). Here d_i is the
             probability that the batch's own mixture visits (h, x, a) in a first estimate of
             the model, and k counts the states that may follow (h, x, a).

A weight is the share of a count's variance that comes from sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from riffle.common.mechanism.policy import Mixture
from riffle.coordinator.learning.learner import BatchCounts, BoolArray, FloatArray
from riffle.coordinator.learning.planning import occupancy
from riffle.coordinator.learning.postprocess import (
    ConsistentCounts,
    conserve,
    consistent,
    estimate_rewards,
)

Weights = Sequence[FloatArray]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Unbiased counts of one batch, or of several batches that each count one layer.

    For Hs counted steps, `transitions` are (..., Hs, X, A, X), `visits` and `rewards` (..., Hs, X,
    A). `rewards` is None if rewards were not counted. `n` is the number of episodes counted at each
    step. The variances of the noise lack the leading dimensions "...". `possible` (Hs, X, A, X) is
    the support. `mixtures` has one mixture for each step, or a single one for all steps.
    """

    n: float
    transitions: FloatArray
    visits: FloatArray
    rewards: FloatArray | None
    transition_variance: FloatArray
    visit_variance: FloatArray
    reward_variance: FloatArray
    possible: BoolArray
    mixtures: tuple[Mixture, ...] = ()

    def step(self, h: int) -> Evidence:
        """Returns the counts of step h alone. The axis of steps keeps the length 1."""
        return replace(
            self,
            transitions=self.transitions[..., h : h + 1, :, :, :],
            visits=self.visits[..., h : h + 1, :, :],
            rewards=None if self.rewards is None else self.rewards[..., h : h + 1, :, :],
            transition_variance=self.transition_variance[h : h + 1],
            visit_variance=self.visit_variance[h : h + 1],
            reward_variance=self.reward_variance[h : h + 1],
            possible=self.possible[h : h + 1],
        )

    def conserve_flow(self) -> Evidence:
        """Returns flow-consistent counts (`postprocess.conserve`).

        The result keeps the old variances, which are upper bounds of the true variances.
        """
        c, possible = self.transitions, self.possible
        if len(self.mixtures) > 1:
            # With one batch for each step, a batch's only equation is that its counts sum to n.
            surplus = c.sum(axis=(-3, -2, -1), keepdims=True) - self.n
            N = c - surplus * possible / possible.sum(axis=(-3, -2, -1), keepdims=True)
        elif np.allclose(self.visit_variance, self.transition_variance.sum(axis=-1)):
            N = conserve(c, self.n, possible=possible)
        else:
            ratio = float(self.transition_variance.max() / self.visit_variance.max())
            N = conserve(c, self.n, possible=possible, visits=self.visits, ratio=ratio)
        return replace(self, transitions=N, visits=N.sum(axis=-1))

    def expected_visits(self, P: FloatArray, d1: FloatArray) -> FloatArray:
        """Returns the expected visits of n episodes at Hs steps (Hs, X, A); P is (H, X, A, X)."""
        d = [_visitation(mixture, P, d1) for mixture in self.mixtures]
        if len(d) == 1:
            return np.asarray(self.n * d[0][: self.transitions.shape[-4]])
        return np.asarray(self.n * np.stack([rows[h] for h, rows in enumerate(d)]))


def _visitation(mixture: Mixture, P: FloatArray, d1: FloatArray) -> FloatArray:
    """Returns the probabilities (H, X, A) that a mixture visits (h, x, a)."""
    d = occupancy(P, d1, mixture.policies)
    return np.asarray((mixture.probabilities @ d.reshape(len(d), -1)).reshape(P.shape[:-1]))


def evidence_of(batches: Sequence[BatchCounts], mixtures: Sequence[Mixture]) -> Evidence:
    """Returns the evidence of one batch, or of stacked one-layer batches of nearly equal n."""
    rewards = [batch.rewards for batch in batches if batch.rewards is not None]
    return Evidence(
        float(np.mean([batch.n for batch in batches])),
        np.concatenate([batch.transitions for batch in batches]),
        np.concatenate([batch.visits for batch in batches]),
        np.concatenate(rewards) if len(rewards) == len(batches) else None,
        np.concatenate([batch.transition_variance for batch in batches]),
        np.concatenate([batch.visit_variance for batch in batches]),
        np.concatenate([batch.reward_variance for batch in batches]),
        np.concatenate([batch.layout.possible for batch in batches]),
        tuple(mixtures),
    )


def batch_weights(parts: Sequence[Evidence]) -> Weights:
    """Returns one weight for each batch. A single batch has weight one."""
    if len(parts) == 1:
        return (np.ones(()),)
    X, A = parts[0].transitions.shape[-3:-1]
    return tuple(np.asarray(p.n / (p.n + X * A * p.transition_variance.max())) for p in parts)


def visit_weights(parts: Sequence[Evidence], P: FloatArray, d1: FloatArray) -> Weights:
    """Returns weights by the rule `visits`: for each batch, an array (Hs, X, A) over Hs steps."""
    weights = []
    for part in parts:
        m = part.expected_visits(P, d1)
        noise = part.transition_variance.sum(axis=-1)
        weights.append(np.divide(m, m + noise, out=np.zeros_like(m), where=m > 0))
    return tuple(weights)


@dataclass(frozen=True, slots=True)
class Counts:
    """A weighted sum of evidence, with the variance of the noise on each entry of the sum."""

    transitions: FloatArray
    visits: FloatArray
    transition_variance: FloatArray
    visit_variance: FloatArray
    possible: BoolArray

    def consistent(self, E: float, *, add_on: bool) -> ConsistentCounts:
        """Applies Eq. 7 of paper 000, then the add-on if `add_on`; `E` is the counts' precision."""
        return consistent(self.transitions, self.visits, E, add_on=add_on, possible=self.possible)


def pool(parts: Sequence[Evidence], weights: Weights, *, alike: bool = False) -> Counts:
    """Returns the weighted sum of `parts`. If steps are `alike`, adds them up to a single step."""
    pairs = list(zip(weights, parts, strict=True))
    masks = [part.possible.any(axis=0, keepdims=True) if alike else part.possible for part in parts]
    return Counts(
        sum_terms([w[..., None] * part.transitions for w, part in pairs], 4, alike),
        sum_terms([w * part.visits for w, part in pairs], 3, alike),
        sum_terms([w[..., None] ** 2 * part.transition_variance for w, part in pairs], 4, alike),
        sum_terms([w**2 * part.visit_variance for w, part in pairs], 3, alike),
        np.logical_or.reduce(masks),
    )


def shrink_rows(T: FloatArray, k: FloatArray, possible: BoolArray) -> FloatArray:
    """Adds k (H, X, A) pseudo-visits to the counts T (..., H, X, A, X) of `possible` transitions.

    Pseudo-visits are spread over x' in proportion to the counts of (x, a), summed over all steps.
    """
    total = T.sum(axis=-4, keepdims=True)
    row = total / np.maximum(total.sum(axis=-1, keepdims=True), 1e-9)
    return np.asarray(T + k[..., None] * row * possible)


def shrink_rewards(R: FloatArray, N: FloatArray, k: FloatArray, s: FloatArray) -> FloatArray:
    """Adds the rewards of k (H, X, A) pseudo-visits to reward sums R (..., H, X, A).

    A pseudo-visit of (x, a) earns the mean reward of (x, a) over all steps. N are visits in the
    shape of R; s (H, X, A) is the standard deviation of the noise on N.
    """
    noise = np.sqrt((s**2).sum(axis=-3, keepdims=True))
    visits = np.maximum(N.sum(axis=-3, keepdims=True), noise)
    return np.asarray(R + k * estimate_rewards(R.sum(axis=-3, keepdims=True), visits))


def sum_terms(terms: Sequence[FloatArray], axes: int, alike: bool) -> FloatArray:
    """Adds arrays. If `alike`, also sums over layers, the `axes`-th axis from the end."""
    if alike:
        terms = [term.sum(axis=-axes, keepdims=True) for term in terms]
    return sum(terms[1:], start=terms[0])
