"""Elimination radii: line 9 of Algorithm 1 (000), or a parametric bootstrap of the private counts.

The literal radius is worst case: 2C (sqrt(X A H^3 iota / L_b) + X^3 A H^5 E iota / L_b).

The bootstrap draws the counts again in the estimated model (sampling error and privacy noise, both
Gaussian, around the post-processed counts) and runs the same estimator on each draw. With pi^ the
best policy of the estimate V^ and pi_d that of draw V_d, the radius is a high quantile of

    max{ V_d(pi_d) - V_d(pi^),  V^(pi^) - V^(pi_d) }.

The first asks, if the estimate were the truth, by how much its best policy may seem worse than
another. The second, if a draw were the truth (a posterior under a flat prior), by how much its best
policy seems worse in the estimate: a policy that is rarely visited, and so uncertain, keeps its
place though the estimate has it well below. pi_d are also the policies likely to be best, which
the next stage explores.

They take, at every (h, x, a), an action of some active policy; the active ones are among these, so
the quantile is on the safe side. W is kept: the bias of the absorbing MDP is not in it (tests state
how often the optimal policy survives). A reward sum is drawn given the visits that are drawn
(Bernoulli bits: variance r (1 - r) a visit), and with the family `joint` its noise is part of the
visits' noise, since both are sums of the same counters. The sampling variance of a count is taken
as at least one, so that what was never seen does not pass for known.

It is post-processing: it sees private counts only. Its draws come from a generator that is given,
seeded by the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from riffle.common.mechanism.counters import Families, Sizes
from riffle.coordinator.learning.learner import FloatArray, PolicyArray
from riffle.coordinator.learning.planning import plan, value
from riffle.coordinator.learning.postprocess import ConsistentCounts, consistent
from riffle.coordinator.learning.sdp_pe.active import ActiveSet
from riffle.coordinator.learning.sdp_pe.estimation import Estimator, Evidence

DRAWS = 400
LIKELY = 50
AT_ONCE = 4_000_000


def literal_radius(sizes: Sizes, L_b: int, E: float, iota: float, C: float) -> float:
    """Line 9 of Algorithm 1, in value units."""
    X, A, H = sizes.X, sizes.A, sizes.H
    return 2 * C * (math.sqrt(X * A * H**3 * iota / L_b) + X**3 * A * H**5 * E * iota / L_b)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """radius, in value units, and the best policies pi_d of the first draws, (LIKELY, H, X)."""

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
    """The quantile at `level`; `families` says which counts share their noise."""
    model = estimator.model(parts)
    best = active.best(model).policy
    allowed, gaps, policies = active.actions, [], []
    centres = [consistent(p.transitions, p.visits, 0.0, add_on=False) for p in parts]

    def resample(draws: int) -> list[Evidence]:
        return [
            _resample(generator, draws, part, centre, model.r, families)
            for part, centre in zip(parts, centres, strict=True)
        ]

    for drawn in _ahead(resample, _portions(sum(part.transitions.size for part in parts))):
        P, r = estimator.model(drawn)
        # An action that no active policy takes costs more than a run can earn, so none is planned.
        found = plan(P, np.where(allowed, r, -float(estimator.H + 1)), active.d1)
        in_draw = found.value - value(P, r, active.d1, best)
        in_estimate = value(*model, active.d1, best) - value(*model, active.d1, found.policy)
        gaps.append(np.maximum(in_draw, in_estimate))
        policies.append(found.policy)
    radius = float(np.quantile(np.concatenate(gaps), level))
    return Bootstrap(radius, np.concatenate(policies)[:LIKELY])


def _portions(counts: int) -> list[int]:
    """DRAWS together while that is AT_ONCE numbers or fewer, else one by one, as caches like it."""
    return [DRAWS] if DRAWS * counts <= AT_ONCE else [1] * DRAWS


def _ahead(
    make: Callable[[int], list[Evidence]], portions: Sequence[int]
) -> Iterator[list[Evidence]]:
    """What is made of each portion, in order; the next in a thread while one is worked on.

    One thread makes all, so a generator is asked in the order of the portions.
    """
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(make, portions[0])
        for portion in portions[1:]:
            made, coming = coming.result(), thread.submit(make, portion)
            yield made
        yield coming.result()


def _resample(
    generator: np.random.Generator,
    draws: int,
    part: Evidence,
    centre: ConsistentCounts,
    r: FloatArray,
    families: Families,
) -> Evidence:
    """Copies of a batch's counts, around the post-processed ones."""
    true = _gaussian(generator, draws, centre.transitions, np.maximum(centre.transitions, 1.0))
    zeros, noise_variance = np.zeros_like(centre.transitions), part.transition_variance
    # In `joint` a transition is the sum of two counters, and a reward sum is made of one of them.
    shares = 2 if families == "joint" else 1
    noise = [_gaussian(generator, draws, zeros, noise_variance / shares) for _ in range(shares)]
    transitions = true + sum(noise)
    visits = transitions.sum(axis=-1)
    if families == "paper":
        own = _gaussian(generator, draws, zeros[..., 0], part.visit_variance)
        visits = true.sum(axis=-1) + own
    rewards = None
    if part.rewards is not None:
        bits = np.maximum(r * (1 - r) * centre.visits, 1.0)
        if families == "joint":
            rewards = _gaussian(generator, draws, zeros[..., 0], bits) + noise[0].sum(axis=-1)
        else:
            rewards = _gaussian(generator, draws, zeros[..., 0], bits + part.reward_variance)
        rewards += r * true.sum(axis=-1)
    return replace(part, transitions=transitions, visits=visits, rewards=rewards)


def _gaussian(
    generator: np.random.Generator,
    draws: int,
    mean: FloatArray,
    variance: FloatArray | float,
) -> FloatArray:
    """Independent Gaussian copies of an array."""
    return mean + generator.standard_normal((draws, *mean.shape)) * np.sqrt(variance)
