"""Models of the absorbing MDP from private counts, and the error that such a model may have.

`Estimator.model` turns raw counts, by Eq. 7, into P~ and r~ (paper 000, Eq. 3). The parametric
bootstrap calls the same method with stacks of random counts. It therefore runs exactly the
estimator whose error it measures.

**Shrinkage.** Each row (h, x, a) gets k pseudo-visits, spread like the counts of (x, a) over all
steps (`evidence.shrink_rows`). k is `shrinkage` times the standard deviation of the noise on the
row's visits. If the noise is large, pseudo-visits outnumber visits, and all steps have nearly the
same estimate. This estimate is biased if steps differ.

**Bootstrap radius.** This radius replaces line 9 of Algorithm 1. New counts are drawn around the
post-processed counts, with Gaussian sampling error and privacy noise. Each draw d goes through the
estimator, which gives values V_d. The real counts give values V^, without shrinkage, so that the
radius includes the bias of shrinkage. Let pi^ be the best policy of V^, and pi_d the best policy of
V_d. The radius is a high quantile, over draws, of the gap

    max{ V_d(pi_d) - V_d(pi^),  V^(pi^) - V^(pi_d) }.

If the estimate is true, pi^ is the best policy; the first term says how much worse pi^ may seem in
a draw. If the draw is true, pi_d is the best policy; the second term says how much worse pi_d seems
in the estimate. The policies pi_d are likely to be the best, so the next stage explores them.

pi_d is the best of all policies that take, at every (h, x), an action of some active policy. These
include all active policies, so the quantile errs on the safe side. All draws have the same set W of
infrequent tuples, so the radius does not include the bias of the absorbing MDP. A reward sum is
drawn given the drawn visits: its bits are Bernoulli, with variance r (1 - r) for each visit. With
the families `joint`, the noise of a reward sum is part of the visits' noise. The sampling variance
of a count is taken as at least one. So a tuple that was never counted does not seem certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from riffle.common.mechanism.counters import Families
from riffle.coordinator.learning.evidence import (
    Evidence,
    Weights,
    pool,
    shrink_rewards,
    shrink_rows,
    sum_terms,
)
from riffle.coordinator.learning.learner import BoolArray, FloatArray, PolicyArray
from riffle.coordinator.learning.planning import Model, plan, value
from riffle.coordinator.learning.postprocess import (
    ConsistentCounts,
    consistent,
    estimate_rewards,
    estimate_transition,
)
from riffle.coordinator.learning.sdp_pe.active import ActiveSet

DRAWS = 400
LIKELY = 50
LARGEST_STACK = 4_000_000
"""If all draws hold more numbers than this, they are made one at a time, to fit the cache."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """How a model is estimated from counts; all draws of a bootstrap share these choices.

    H is the horizon. W (H or 1, X, A, X) marks the (h, x, a, x') that lead to the absorbing state.
    E is the precision in Eq. 7 of 000, in counts. `weights` has an array for each `Evidence`.
    `alike` sums counts over steps. The other fields are those of `Constants`.
    """

    H: int
    W: BoolArray
    E: float
    add_on: bool
    least_visits: float
    weights: Weights
    alike: bool = False
    flow: bool = False
    shrinkage: float = 0.0

    @property
    def _shrinks(self) -> bool:
        return self.shrinkage > 0 and self.H > 1 and not self.alike

    def model(self, parts: Sequence[Evidence]) -> Model:
        """Returns P~ and r~ of the absorbing MDP from one set of counts or a stack of sets."""
        if self.flow:
            parts = [part.conserve_flow() for part in parts]
        counts = pool(parts, self.weights, alike=self.alike)
        T = counts.consistent(self.E, add_on=self.add_on).transitions
        if self._shrinks:
            k = self.shrinkage * np.sqrt(counts.visit_variance)
            T = shrink_rows(T, k, counts.possible)
        P, r = estimate_transition(T, self.W), self._rewards(parts)
        return Model(_every_step(P, self.H, 4), _every_step(r, self.H, 3))

    def _rewards(self, parts: Sequence[Evidence]) -> FloatArray:
        """Returns the estimated rewards r~, from those `parts` that counted rewards."""
        pairs = [
            (w, part)
            for w, part in zip(self.weights, parts, strict=True)
            if part.rewards is not None
        ]
        counts = pool([part for _, part in pairs], [w for w, _ in pairs], alike=self.alike)
        N = counts.consistent(self.E, add_on=self.add_on).visits
        R = sum_terms(
            [w * part.rewards for w, part in pairs if part.rewards is not None], 3, self.alike
        )
        s = np.sqrt(counts.visit_variance)
        least = self.least_visits * s
        if self._shrinks:
            k = self.shrinkage * s
            R, N = shrink_rewards(R, N, k, s), N + k
        return estimate_rewards(R, np.maximum(N, least))


def _every_step(array: FloatArray, H: int, axes: int) -> FloatArray:
    """If steps were summed, repeats the step axis (the `axes`-th from the end) H times."""
    return np.broadcast_to(array, (*array.shape[:-axes], H, *array.shape[-axes + 1 :]))


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The radius, in units of value. `likely` (LIKELY, H, X) has the first draws' best policies."""

    radius: float
    likely: PolicyArray


def bootstrap(
    generator: np.random.Generator,
    parts: Sequence[Evidence],
    estimator: Estimator,
    active: ActiveSet,
    *,
    level: float,
    families: Families,
) -> Bootstrap:
    """Resamples the counts; returns the radius and the best policies of the first draws.

    The radius is the quantile `level` of the gaps in value between the estimate's best policy and
    a draw's best policy. `families` says which counts share their noise.
    """
    model = replace(estimator, shrinkage=0.0).model(parts)
    best = active.best(model).policy
    actions, gaps, policies = active.actions, [], []
    centres = [
        consistent(p.transitions, p.visits, 0.0, add_on=False, possible=p.possible) for p in parts
    ]

    def draw(draws: int) -> list[Evidence]:
        return [
            _resample(generator, draws, part, centre, model.r, families)
            for part, centre in zip(parts, centres, strict=True)
        ]

    size = DRAWS * sum(part.transitions.size for part in parts)
    for drawn in _prefetch(draw, [DRAWS] if size <= LARGEST_STACK else [1] * DRAWS):
        P, r = estimator.model(drawn)
        # An action that no active policy takes costs more than an episode earns: no plan takes it.
        pi_d = plan(P, np.where(actions, r, -float(estimator.H + 1)), active.d1)
        in_draw = pi_d.value - value(P, r, active.d1, best)
        in_estimate = value(*model, active.d1, best) - value(*model, active.d1, pi_d.policy)
        gaps.append(np.maximum(in_draw, in_estimate))
        policies.append(pi_d.policy)
    radius = float(np.quantile(np.concatenate(gaps), level))
    return Bootstrap(radius, np.concatenate(policies)[:LIKELY])


def _prefetch(
    draw: Callable[[int], list[Evidence]], sizes: Sequence[int]
) -> Iterator[list[Evidence]]:
    """Yields `draw(size)` for each size, in order. A thread makes the next draw meanwhile.

    There is only one such thread, so random numbers are drawn in the order of the sizes.
    """
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(draw, sizes[0])
        for size in sizes[1:]:
            drawn, following = following.result(), thread.submit(draw, size)
            yield drawn
        yield following.result()


def _resample(
    generator: np.random.Generator,
    draws: int,
    part: Evidence,
    centre: ConsistentCounts,
    r: FloatArray,
    families: Families,
) -> Evidence:
    """Draws the counts of `part` anew, `draws` times, around its post-processed counts `centre`."""

    def gaussian(mean: FloatArray, variance: FloatArray | float) -> FloatArray:
        drawn = generator.standard_normal((draws, *mean.shape))
        return np.asarray(mean + drawn * np.sqrt(variance))

    true = gaussian(centre.transitions, np.maximum(centre.transitions, 1.0) * part.possible)
    zeros = np.zeros_like(centre.transitions)
    # In `joint` a transition count is the sum of two counters; a reward sum uses one of them.
    shares = 2 if families == "joint" else 1
    noise = [gaussian(zeros, part.transition_variance / shares) for _ in range(shares)]
    transitions = true + sum(noise)
    visits = transitions.sum(axis=-1)
    if families == "paper":
        visits = true.sum(axis=-1) + gaussian(zeros[..., 0], part.visit_variance)
    rewards = None
    if part.rewards is not None:
        bits = np.maximum(r * (1 - r) * centre.visits, 1.0) * part.possible.any(axis=-1)
        if families == "joint":
            rewards = gaussian(zeros[..., 0], bits) + noise[0].sum(axis=-1)
        else:
            rewards = gaussian(zeros[..., 0], bits + part.reward_variance)
        rewards += r * true.sum(axis=-1)
    return replace(part, transitions=transitions, visits=visits, rewards=rewards)
