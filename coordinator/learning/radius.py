"""Elimination radii: line 9 of Algorithm 1 (000), or a parametric bootstrap of the private counts.

The literal radius is worst case: 2C (sqrt(X A H^3 iota / L_b) + X^3 A H^5 E iota / L_b).

The bootstrap asks directly what must not happen: that the optimal policy seems worse than another
by the radius. In the estimated model, whose optimal policy pi^ is known, it draws the counts again
(sampling error and privacy noise, both Gaussian, around the post-processed counts), runs
the same estimator on each draw, and takes a high quantile of the apparent gap. The sampling
variance of a count is taken as at least one, so that what was never seen does not pass for known:

    max_mu V^mu(draw) - V^pi^(draw).

The maximum runs over the policies that take, at every (h, x), an action of some active policy; the
active ones are among them, so the quantile is on the safe side. W is kept: the bias of the
absorbing MDP is not in it (tests state how often the optimal policy survives). It is
post-processing: it sees private counts only. Its draws come from a generator that is given, seeded
by the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common.counters import Sizes
from coordinator.learning.active import ActiveSet
from coordinator.learning.estimation import Estimator, Evidence
from coordinator.learning.learner import FloatArray
from coordinator.learning.planning import plan, value
from coordinator.postprocess import ConsistentCounts, consistent

DRAWS = 400
AT_ONCE = 4_000_000


def literal_radius(sizes: Sizes, L_b: int, E: float, iota: float, C: float) -> float:
    """Line 9 of Algorithm 1, in value units."""
    X, A, H = sizes.X, sizes.A, sizes.H
    return 2 * C * (math.sqrt(X * A * H**3 * iota / L_b) + X**3 * A * H**5 * E * iota / L_b)


def bootstrap_radius(
    generator: np.random.Generator,
    parts: Sequence[Evidence],
    estimator: Estimator,
    active: ActiveSet,
    *,
    level: float,
    summed_visits: bool,
) -> float:
    """Quantile at `level` of the best policy's apparent gap, in value units.

    `summed_visits` says that visits are sums of the transitions (families lean, joint) and so share
    their noise, rather than carrying noise of their own (family paper).
    """
    model = estimator.model(parts)
    best = active.best(model).policy
    allowed, gaps = active.actions, []
    centres = [consistent(p.transitions, p.visits, 0.0, add_on=False) for p in parts]
    for draws in _portions(sum(part.transitions.size for part in parts)):
        drawn = [
            _resample(generator, draws, part, centre, model.r, summed_visits=summed_visits)
            for part, centre in zip(parts, centres, strict=True)
        ]
        P, r = estimator.model(drawn)
        # An action that no active policy takes costs more than a run can earn, so none is planned.
        rewards = np.where(allowed, r, -float(estimator.H + 1))
        gaps.append(plan(P, rewards, active.d1).value - value(P, r, active.d1, best))
    return float(np.quantile(np.concatenate(gaps), level))


def _portions(counts: int) -> list[int]:
    """DRAWS in portions of about AT_ONCE numbers, for draws of so many counts each."""
    portion = max(1, min(DRAWS, AT_ONCE // counts))
    return [min(portion, DRAWS - done) for done in range(0, DRAWS, portion)]


def _resample(
    generator: np.random.Generator,
    draws: int,
    part: Evidence,
    centre: ConsistentCounts,
    r: FloatArray,
    *,
    summed_visits: bool,
) -> Evidence:
    """Copies of a batch's counts, around the post-processed ones."""
    true = _gaussian(generator, draws, centre.transitions, np.maximum(centre.transitions, 1.0))
    no_counts = np.zeros_like(centre.transitions)
    transitions = true + _gaussian(generator, draws, no_counts, part.transition_variance)
    visits = transitions.sum(axis=-1)
    if not summed_visits:
        noise = _gaussian(generator, draws, np.zeros_like(centre.visits), part.visit_variance)
        visits = true.sum(axis=-1) + noise
    rewards = None
    if part.rewards is not None:
        mean = centre.visits * r[: len(centre.visits)]
        rewards = _gaussian(generator, draws, mean, np.maximum(mean, 1.0) + part.reward_variance)
    return replace(part, transitions=transitions, visits=visits, rewards=rewards)


def _gaussian(
    generator: np.random.Generator,
    draws: int,
    mean: FloatArray,
    variance: FloatArray | float,
) -> FloatArray:
    """Independent Gaussian copies of an array."""
    return mean + generator.standard_normal((draws, *mean.shape)) * np.sqrt(variance)
