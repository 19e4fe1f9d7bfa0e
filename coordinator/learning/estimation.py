"""A model of the absorbing MDP from private counts, and which counts it is made from.

Raw counts -> Eq. 7 -> P~ and r~ (000, Eq. 3), in one function that also takes stacks of counts, so
that the parametric bootstrap runs the very estimator it judges. The document uses the fine batch of
the stage only; pooling adds its crude batches, memory those of earlier stages. Batches i are added
with weights n_i / (n_i + X A sigma_i^2), the share of sampling in the variance of a typical count:
near one for a large batch, about n_i / sigma_i^2 (the matched filter) for one lost in noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.learning.absorbing import BoolArray, estimate_rewards, estimate_transition
from coordinator.learning.enumeration import Model
from coordinator.learning.learner import BatchCounts, FloatArray
from coordinator.postprocess import ConsistentCounts, consistent


@dataclass(frozen=True, slots=True)
class Evidence:
    """Unbiased counts of a batch (or of one a layer): (..., Hs, X, A, X), (..., Hs, X, A) twice.

    `rewards` is None when they were not counted; n is the number of episodes behind each step. The
    variances are those of the noise on one entry.
    """

    n: float
    transitions: FloatArray
    visits: FloatArray
    rewards: FloatArray | None
    transition_variance: float
    visit_variance: float
    reward_variance: float

    @property
    def weight(self) -> float:
        """n / (n + X A sigma^2), see the module's docstring."""
        X, A = self.transitions.shape[-3:-1]
        return self.n / (self.n + int(X) * int(A) * self.transition_variance)

    def step(self, h: int) -> Evidence:
        """The counts of step h alone, Hs = 1."""
        rewards = None if self.rewards is None else self.rewards[..., h : h + 1, :, :]
        return self._with(
            1, self.transitions[..., h : h + 1, :, :, :], self.visits[..., h : h + 1, :, :], rewards
        )

    def over_steps(self) -> Evidence:
        """The counts summed over steps, Hs = 1, for a time-homogeneous environment."""
        rewards = None if self.rewards is None else self.rewards.sum(axis=-3, keepdims=True)
        return self._with(
            self.transitions.shape[-4],
            self.transitions.sum(axis=-4, keepdims=True),
            self.visits.sum(axis=-3, keepdims=True),
            rewards,
        )

    def _with(
        self, terms: int, transitions: FloatArray, visits: FloatArray, rewards: FloatArray | None
    ) -> Evidence:
        return Evidence(
            terms * self.n,
            transitions,
            visits,
            rewards,
            terms * self.transition_variance,
            terms * self.visit_variance,
            terms * self.reward_variance,
        )


def of_batches(batches: Sequence[BatchCounts]) -> Evidence:
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
    )


@dataclass(frozen=True, slots=True)
class Counts:
    """A weighted sum of evidence: consistent counts, and the noise variance of a transition."""

    transitions: FloatArray
    visits: FloatArray
    transition_variance: float
    visit_variance: float

    def consistent(self, E: float, *, add_on: bool) -> ConsistentCounts:
        """Eq. 7 and the add-on, with E in (weighted) counts."""
        return consistent(self.transitions, self.visits, E, add_on=add_on)


def pooled(parts: Sequence[Evidence]) -> Counts:
    """The weighted sum; one part alone keeps weight one, so that E stays in counts."""
    w = [1.0] if len(parts) == 1 else [part.weight for part in parts]
    pairs = list(zip(w, parts, strict=True))
    transitions, visits = pairs[0][0] * parts[0].transitions, pairs[0][0] * parts[0].visits
    for weight, part in pairs[1:]:
        transitions = transitions + weight * part.transitions
        visits = visits + weight * part.visits
    return Counts(
        transitions,
        visits,
        sum(weight**2 * part.transition_variance for weight, part in pairs),
        sum(weight**2 * part.visit_variance for weight, part in pairs),
    )


@dataclass(frozen=True, slots=True)
class Estimator:
    """The choices of estimation, fixed before the counts are seen.

    H is the horizon; W (H or 1, X, A, X) goes to x-dagger; E is the tolerance of Eq. 7 in counts;
    `add_on` as in `Constants`; a reward sum is divided by at least `least_visits`, so that a pair
    hardly visited does not seem rewarding by noise alone (0: literal Eq. 3).
    """

    H: int
    W: BoolArray
    E: float
    add_on: bool
    least_visits: float

    def model(self, parts: Sequence[Evidence]) -> Model:
        """P~ and r~ of the absorbing MDP, for one set of counts or a stack of them."""
        counts = pooled(parts).consistent(self.E, add_on=self.add_on)
        P = estimate_transition(counts.transitions, self.W)
        rewarded = [part for part in parts if part.rewards is not None]
        N = pooled(rewarded).consistent(self.E, add_on=self.add_on).visits
        r = estimate_rewards(_rewards(rewarded), np.maximum(N, self.least_visits))
        return Model(_every_step(P, self.H, 4), _every_step(r, self.H, 3))


def _rewards(parts: Sequence[Evidence]) -> FloatArray:
    """The reward sums, with the weights of `pooled`."""
    rewards = [part.rewards for part in parts if part.rewards is not None]
    if len(parts) == 1:
        return rewards[0]
    total: FloatArray = parts[0].weight * rewards[0]
    for part, reward in zip(parts[1:], rewards[1:], strict=True):
        total = total + part.weight * reward
    return total


def _every_step(array: FloatArray, H: int, axes: int) -> FloatArray:
    """Repeat the layer axis, `axes` from the end, H times when it was summed to one."""
    return np.broadcast_to(array, (*array.shape[:-axes], H, *array.shape[-axes + 1 :]))
