"""Models of the absorbing MDP from private counts, and how far such a model may be off.

Raw counts -> Eq. 7 -> P~ and r~ (000, Eq. 3) is one function (`Estimator.model`) that also takes
stacks of counts, so that the parametric bootstrap runs the very estimator that it judges.

**Which counts.** The document uses the fine batch of the stage only. Pooling adds the stage's crude
batches, memory those of earlier stages. Batches i are added with weights w_i, in one of two ways
(m visits of a typical or of this very (h, x, a), sigma_i^2 the variance of the noise on a
transition count):

    batch:   w_i = m / (m + sigma_i^2),            m = n_i / (X A);
    visits:  w_i(h,x,a) = m / (m + X sigma_i^2),   m = n_i d_i(h,x,a), the visits that the batch's
             own mixture pays to (h, x, a) under a first model of the transitions.

Both are the share of sampling in a count's variance: near one where visits abound, about
m / sigma^2 (the matched filter) where they are lost in noise. With `visits` a batch that never goes
to (h, x, a) adds no noise there.

**Bootstrap radius.** It replaces line 9 of Algorithm 1. The counts are drawn again in the estimated
model (sampling error and privacy noise, both Gaussian, around the post-processed counts) and each
draw goes through the same estimator. With pi^ the best policy of the estimate V^ and pi_d that of
draw V_d, the radius is a high quantile of

    max{ V_d(pi_d) - V_d(pi^),  V^(pi^) - V^(pi_d) }.

The first term asks: if the estimate were true, by how much might its best policy seem worse than
another? The second asks: if a draw were true (a posterior under a flat prior), by how much does its
best policy seem worse in the estimate? So a policy that is rarely visited, and therefore uncertain,
stays although the estimate has it well below. The pi_d are also the policies likely to be best,
which the next stage explores.

At every (h, x, a) the pi_d take an action of some active policy. The active policies are among
these, so the quantile errs on the safe side. W is kept: the bias of the absorbing MDP is not in the
radius (tests state how often the optimal policy survives). A reward sum is drawn given the visits
that are drawn (Bernoulli bits: variance r (1 - r) a visit). With the family `joint` its noise is
part of the visits' noise, since both are sums of the same counters. The sampling variance of a
count is taken as at least one, so that what was never seen does not pass for known.

All of it is post-processing: it sees private counts only. The draws come from the caller's
generator, which is seeded by the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from riffle.common.mechanism.counters import Families
from riffle.common.mechanism.policy import Mixture
from riffle.coordinator.learning.learner import BatchCounts, BoolArray, FloatArray, PolicyArray
from riffle.coordinator.learning.planning import Model, occupancy, plan, value
from riffle.coordinator.learning.postprocess import (
    ConsistentCounts,
    conserve,
    consistent,
    estimate_rewards,
    estimate_transition,
)
from riffle.coordinator.learning.sdp_pe.active import ActiveSet

Weights = Sequence[FloatArray]

DRAWS = 400
LIKELY = 50
LARGEST_STACK = 4_000_000
"""Most numbers in stacked draws; beyond it, counts are drawn one by one to fit the cache."""


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

    def step(self, h: int) -> Evidence:
        """Returns the counts of step h alone, Hs = 1."""
        return replace(
            self,
            transitions=self.transitions[..., h : h + 1, :, :, :],
            visits=self.visits[..., h : h + 1, :, :],
            rewards=None if self.rewards is None else self.rewards[..., h : h + 1, :, :],
        )

    def conserve_flow(self) -> Evidence:
        """Returns flow-consistent counts (`postprocess.conserve`); visits are then sums.

        The variances stay those of the counts as they came, which errs on the safe side.
        """
        if len(self.mixtures) > 1:
            # A batch a step: all that is known of each is its sum.
            N = conserve(self.transitions[..., None, :, :, :], self.n)[..., 0, :, :, :]
        elif self.visit_variance == self.transition_variance * self.transitions.shape[-1]:
            N = conserve(self.transitions, self.n)
        else:
            ratio = self.transition_variance / self.visit_variance
            N = conserve(self.transitions, self.n, visits=self.visits, ratio=ratio)
        return replace(self, transitions=N, visits=N.sum(axis=-1))

    def expected_visits(self, P: FloatArray, d1: FloatArray) -> FloatArray:
        """Returns n d(h, x, a) of the steps counted, (Hs, X, A), under P (H, X, A, X)."""
        d = [_visitation(mixture, P, d1) for mixture in self.mixtures]
        if len(d) == 1:
            return np.asarray(self.n * d[0][: self.transitions.shape[-4]])
        return np.asarray(self.n * np.stack([rows[h] for h, rows in enumerate(d)]))


def _visitation(mixture: Mixture, P: FloatArray, d1: FloatArray) -> FloatArray:
    """Returns d(h, x, a) (H, X, A) of a mixture."""
    d = occupancy(P, d1, mixture.policies)
    return np.asarray((mixture.probabilities @ d.reshape(len(d), -1)).reshape(P.shape[:-1]))


def evidence_of(batches: Sequence[BatchCounts], mixtures: Sequence[Mixture]) -> Evidence:
    """Returns the evidence of one batch, or of stacked one-layer batches (n may differ by one)."""
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
    """Returns one weight a batch; a single batch has weight one, so that E stays in counts."""
    if len(parts) == 1:
        return (np.ones(()),)
    X, A = parts[0].transitions.shape[-3:-1]
    return tuple(np.asarray(p.n / (p.n + X * A * p.transition_variance)) for p in parts)


def visit_weights(parts: Sequence[Evidence], P: FloatArray, d1: FloatArray) -> Weights:
    """Returns the weights (Hs, X, A) of each batch, one for every (h, x, a)."""
    weights = []
    for part in parts:
        m = part.expected_visits(P, d1)
        noise = m.shape[-2] * part.transition_variance
        weights.append(np.divide(m, m + noise, out=np.zeros_like(m), where=m > 0))
    return tuple(weights)


@dataclass(frozen=True, slots=True)
class Counts:
    """A weighted sum of evidence; the variances are those of the noise on an entry of each."""

    transitions: FloatArray
    visits: FloatArray
    transition_variance: FloatArray
    visit_variance: FloatArray

    def consistent(self, E: float, *, add_on: bool) -> ConsistentCounts:
        """Applies Eq. 7 and the add-on, with E in (weighted) counts."""
        return consistent(self.transitions, self.visits, E, add_on=add_on)


def pool(parts: Sequence[Evidence], weights: Weights, *, alike: bool = False) -> Counts:
    """Returns the weighted sum; `alike` sums over steps too (Hs = 1): homogeneous environments."""
    pairs = list(zip(weights, parts, strict=True))
    squares = [np.broadcast_to(w**2, part.visits.shape[-3:]) for w, part in pairs]
    return Counts(
        _sum([w[..., None] * part.transitions for w, part in pairs], 4, alike),
        _sum([w * part.visits for w, part in pairs], 3, alike),
        _sum([w2 * p.transition_variance for w2, p in zip(squares, parts, strict=True)], 3, alike),
        _sum([w2 * p.visit_variance for w2, p in zip(squares, parts, strict=True)], 3, alike),
    )


def _sum(terms: Sequence[FloatArray], axes: int, alike: bool) -> FloatArray:
    """Adds terms whose layer axis is `axes` from the end; `alike` sums over layers as well."""
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
        """Returns P~ and r~ of the absorbing MDP, for one set of counts or a stack of them."""
        if self.flow:
            parts = [part.conserve_flow() for part in parts]
        N = pool(parts, self.weights, alike=self.alike).consistent(self.E, add_on=self.add_on)
        P, r = estimate_transition(N.transitions, self.W), self._rewards(parts)
        return Model(_every_step(P, self.H, 4), _every_step(r, self.H, 3))

    def _rewards(self, parts: Sequence[Evidence]) -> FloatArray:
        """Returns r~ from the parts that counted rewards."""
        pairs = [
            (w, part)
            for w, part in zip(self.weights, parts, strict=True)
            if part.rewards is not None
        ]
        counts = pool([part for _, part in pairs], [w for w, _ in pairs], alike=self.alike)
        N = counts.consistent(self.E, add_on=self.add_on).visits
        R = _sum([w * part.rewards for w, part in pairs if part.rewards is not None], 3, self.alike)
        least = self.least_visits * np.sqrt(counts.visit_variance)
        return estimate_rewards(R, np.maximum(N, least))


def _every_step(array: FloatArray, H: int, axes: int) -> FloatArray:
    """Repeats the layer axis, `axes` from the end, H times when it was summed to one."""
    return np.broadcast_to(array, (*array.shape[:-axes], H, *array.shape[-axes + 1 :]))


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The radius, in value units, and the best policies pi_d of the first draws, (LIKELY, H, X)."""

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
    """Returns the radius at quantile `level`; `families` says which counts share their noise."""
    model = estimator.model(parts)
    best = active.best(model).policy
    actions, gaps, policies = active.actions, [], []
    centres = [consistent(p.transitions, p.visits, 0.0, add_on=False) for p in parts]

    def draw(draws: int) -> list[Evidence]:
        return [
            _resample(generator, draws, part, centre, model.r, families)
            for part, centre in zip(parts, centres, strict=True)
        ]

    size = DRAWS * sum(part.transitions.size for part in parts)
    for drawn in _prefetch(draw, [DRAWS] if size <= LARGEST_STACK else [1] * DRAWS):
        P, r = estimator.model(drawn)
        # An action that no active policy takes costs more than a run can earn, so none is planned.
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
    """Yields `draw(size)` for each size, in order; a thread draws the next while one is in use.

    It is always the same thread, so the generator's numbers come in the order of the sizes.
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
    """Returns copies of a batch's counts, drawn around the post-processed ones."""

    def gaussian(mean: FloatArray, variance: FloatArray | float) -> FloatArray:
        drawn = generator.standard_normal((draws, *mean.shape))
        return np.asarray(mean + drawn * np.sqrt(variance))

    true = gaussian(centre.transitions, np.maximum(centre.transitions, 1.0))
    zeros = np.zeros_like(centre.transitions)
    # In `joint` a transition is the sum of two counters, and a reward sum holds one of them.
    shares = 2 if families == "joint" else 1
    noise = [gaussian(zeros, part.transition_variance / shares) for _ in range(shares)]
    transitions = true + sum(noise)
    visits = transitions.sum(axis=-1)
    if families == "paper":
        visits = true.sum(axis=-1) + gaussian(zeros[..., 0], part.visit_variance)
    rewards = None
    if part.rewards is not None:
        bits = np.maximum(r * (1 - r) * centre.visits, 1.0)
        if families == "joint":
            rewards = gaussian(zeros[..., 0], bits) + noise[0].sum(axis=-1)
        else:
            rewards = gaussian(zeros[..., 0], bits + part.reward_variance)
        rewards += r * true.sum(axis=-1)
    return replace(part, transitions=transitions, visits=visits, rewards=rewards)
