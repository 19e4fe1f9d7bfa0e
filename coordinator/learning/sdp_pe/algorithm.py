"""SDP-PE, Algorithms 1-3 of 000: policy elimination from shuffled private counts.

Each stage b explores crudely (Algorithm 2: one batch a layer, to find the tuples W that are too
rare to learn), then finely (Algorithm 3: one batch of a coverage design over the active policies),
and drops the policies that are provably worse than another (Algorithm 1, lines 7-13). The methods
that run a stage are generators that yield a deployment and are sent its private counts, so that
they read as the pseudocode.

Departures from the document are fields of `Constants` with a name; see `presets`.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from riffle.common.mechanism.counters import CounterLayout
from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import generator_for
from riffle.coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    FloatArray,
    LearnerError,
    LearnerSummary,
    PolicyArray,
    Problem,
    StageResult,
)
from riffle.coordinator.learning.planning import BoolArray, estimate_transition, infrequent
from riffle.coordinator.learning.postprocess import precision
from riffle.coordinator.learning.sdp_pe.active import ActiveSet, everything
from riffle.coordinator.learning.sdp_pe.coverage import Design, design
from riffle.coordinator.learning.sdp_pe.enumeration import Model
from riffle.coordinator.learning.sdp_pe.estimation import (
    Counts,
    Estimator,
    Evidence,
    Weights,
    batch_weights,
    of_batches,
    pooled,
    visit_weights,
)
from riffle.coordinator.learning.sdp_pe.presets import PRACTICAL, Constants
from riffle.coordinator.learning.sdp_pe.radius import bootstrap, literal_radius
from riffle.coordinator.learning.sdp_pe.schedule import Schedule, Stage, of_problem

MOST_AUXILIARY = 512
"""Most policies of pi_0 in a mixture, all of which a descriptor lists."""
MOST_REMEMBERED = 1_000_000
"""Most counters of batches that `memory` keeps: five batches of X=50, A=4, H=20."""

Steps = Generator[Deployment, BatchCounts, None]


@dataclass(frozen=True, slots=True)
class Crude:
    """What Algorithm 2 returns: W, P~cru (H, X, A, X), the atoms (M, H, X) of pi_0, its counts.

    `counts` is None when the stage had no crude batches and W and P~cru come from memory.
    """

    W: BoolArray
    P: FloatArray
    pi_0: PolicyArray
    counts: Evidence | None


@dataclass(frozen=True, slots=True)
class Fine:
    """What Algorithm 3 returns: the model (P~ref, r~), with its counts, estimator and design."""

    model: Model
    counts: tuple[Evidence, ...]
    estimator: Estimator
    design: Design


class SDPPE:
    """One run of SDP-PE over a `Problem`; a `Learner`.

    Raises EnumerationTooLarge when the policies are too many for `enumerated` active sets, and
    LearnerError when K is too small for a stage. Subclasses may change `fine_batches` (the fine
    batch has so many times L_b episodes), the coverage design and the worst-case radius.
    """

    fine_batches = 2

    def __init__(self, problem: Problem, constants: Constants = PRACTICAL) -> None:
        if not (constants.crude_every_stage or constants.memory):
            raise LearnerError("a stage without crude batches needs memory: set memory to true")
        if constants.likely_share > 0 and constants.radius != "bootstrap":
            raise LearnerError("likely_share needs the draws of radius bootstrap: set it to 0")
        self.problem = problem
        self.constants = constants
        self.phi: ActiveSet = everything(problem.sizes, problem.d1, constants.active_set)
        self._decisions = int(self.phi.actions.sum())
        self.schedule: Schedule = of_problem(problem, constants, self.fine_batches)
        X, A, H = problem.sizes.X, problem.sizes.A, problem.sizes.H
        self.iota = math.log(2 * H * A * problem.K / problem.delta)
        self._model = Model(np.zeros((H, X, A, X)), np.zeros((H, X, A)))
        self._results: list[StageResult] = []
        self._memory: tuple[Evidence, ...] = ()
        self._likely: PolicyArray = np.zeros((0, H, X), dtype=np.int64)
        self._used = 0
        self._term = 1.0
        self._steps = self._sdp_pe()
        self._pending: Deployment | None = next(self._steps)

    # -- the Learner protocol ------------------------------------------------------------------

    def next_deployment(self) -> Deployment | None:
        """What to deploy now; None when all K episodes are used."""
        return self._pending

    def observe(self, counts: BatchCounts) -> StageResult | None:
        """Take the current deployment's counts; return the stage's result when it ends."""
        self._check(counts)
        done = len(self._results)
        self._used += counts.n
        self._term = max(self._term, counts.term)
        try:
            self._pending = self._steps.send(counts)
        except StopIteration:
            self._pending = None
        return self._results[-1] if len(self._results) > done else None

    def summary(self) -> LearnerSummary:
        """The best policy of the last active set under the last stage's model."""
        best = self.phi.best(self._model)
        return LearnerSummary(
            policy=best.policy,
            value_estimate=float(best.value),
            active=self.phi.size,
            stage=len(self._results),
            episodes_used=self._used,
            episodes_total=self.problem.K,
            finished=self._pending is None,
            constants=self.constants.as_dict(),
        )

    def _check(self, counts: BatchCounts) -> None:
        if self._pending is None:
            raise LearnerError("the run is over: there is no deployment these counts belong to")
        expected = (self._pending.n, self._layout(self._pending.layer))
        if (counts.n, counts.layout) != expected:
            raise LearnerError(
                f"expected counts of n={expected[0]} and {expected[1]}, "
                f"got n={counts.n} and {counts.layout}"
            )

    def _layout(self, layer: int | None) -> CounterLayout:
        return CounterLayout(self.problem.sizes, self.problem.families, layer)

    # -- Algorithm 1 ---------------------------------------------------------------------------

    def _sdp_pe(self) -> Steps:
        for stage in self.schedule.stages:
            if stage.crude:
                crude = yield from self._crude_exploration(stage)
            else:
                crude = self._remembered(stage)
            fine = yield from self._fine_exploration(stage, crude)
            self._eliminate(stage, crude, fine)
        if self.schedule.exploit > 0:
            best = Mixture.single(self.phi.best(self._model).policy)
            last = len(self.schedule.stages) + 1
            yield Deployment(last, "exploit", best, self.schedule.exploit, 0)

    def _eliminate(self, stage: Stage, crude: Crude, fine: Fine) -> None:
        """Lines 7-13, with the stage's result."""
        radius = self._radius(stage, fine)
        before = self.phi.size
        self.phi, best = self.phi.eliminate(fine.model, radius)
        after = self.phi.size
        # Draws plan within the decisions that are left: what they find may be no member by now.
        members = [self.phi.contains(policy) for policy in self._likely]
        self._likely = self._likely[np.array(members, dtype=np.bool_)]
        self._model = fine.model
        self._results.append(
            StageResult(
                stage=stage.b,
                L_b=stage.L_b,
                episodes=stage.episodes,
                active_before=before,
                active_after=after,
                eliminated=None if before is None or after is None else before - after,
                decisions_eliminated=self._decisions - int(self.phi.actions.sum()),
                radius=radius,
                best_value=best,
                E=self._precision(fine.counts[0].transition_variance),
                infrequent=float(crude.W.mean()),
                coverage_gap=fine.design.gap,
                coverage_iterations=fine.design.iterations,
                policy=self.phi.best(fine.model).policy,
            )
        )

    def _radius(self, stage: Stage, fine: Fine) -> float:
        scale = self.constants.radius_scale
        if self.constants.radius == "paper":
            return self._worst_case(stage.L_b, self._precision(fine.counts[0].transition_variance))
        level = 1 - self.problem.delta / len(self.schedule.stages)
        generator = generator_for(self.problem.seed, "bootstrap", stage.b)
        found = bootstrap(
            generator,
            fine.counts,
            fine.estimator,
            self.phi,
            level=level,
            families=self.problem.families,
        )
        self._likely = found.likely
        return scale * found.radius

    def _worst_case(self, L_b: int, E: float) -> float:
        """The radius of line 9 times C."""
        scale = self.constants.radius_scale
        return literal_radius(self.problem.sizes, L_b, E, self.iota, scale)

    # -- Algorithm 2 ---------------------------------------------------------------------------

    def _crude_exploration(self, stage: Stage) -> Generator[Deployment, BatchCounts, Crude]:
        X, A, H = self.problem.sizes.X, self.problem.sizes.A, self.problem.sizes.H
        P_cru = np.zeros((H, X, A, X))
        W = np.ones((H, X, A, X), dtype=np.bool_)
        atoms: list[PolicyArray] = []
        mixtures: list[Mixture] = []
        batches: list[BatchCounts] = []
        for h in range(H):
            pi_h = self._best_visits(P_cru, h, stage.crude[h])
            mixtures.append(Mixture.from_probabilities(pi_h, np.ones(len(pi_h))))
            counts = yield Deployment(stage.b, "crude", mixtures[-1], stage.crude[h], h)
            atoms.append(pi_h)
            batches.append(counts)
            steps = slice(None) if self.constants.homogeneous else slice(h, h + 1)
            W[steps], P_cru[steps] = self._estimate_layer(h, of_batches(batches, mixtures), P_cru)
        return Crude(W, P_cru, np.concatenate(atoms), of_batches(batches, mixtures))

    def _remembered(self, stage: Stage) -> Crude:
        """What Algorithm 2 would return, from the counts of the stages before alone."""
        H = self.problem.sizes.H
        weights = self._weights(self._memory, self._model.P)
        counts = pooled(self._memory, weights, alike=self.constants.homogeneous)
        W, P = self._estimate_rows(counts)
        shape = (H, *W.shape[1:])
        P = np.broadcast_to(P, shape)
        atoms = [self._best_visits(P, h, stage.fine) for h in range(H)]
        return Crude(np.broadcast_to(W, shape), P, np.concatenate(atoms), None)

    def _best_visits(self, P: FloatArray, h: int, n: int) -> PolicyArray:
        """pi^cru_{h,x,a} (M, H, X) of every pair (x, a) that n episodes are expected to visit.

        Line 4 of Algorithm 2 is a tie between all policies for a pair that none reaches; the tie is
        broken towards the policies of the pairs that are reached.
        """
        found = self.phi.best_visits(P, h, self._model)
        reached = found.value * n >= 1
        if not reached.any():
            reached[:] = True
        policies: PolicyArray = found.policy[reached]
        return policies

    def _estimate_layer(
        self, h: int, crude: Evidence, P_cru: FloatArray
    ) -> tuple[BoolArray, FloatArray]:
        """Lines 9-10: W and P~cru of layer h, or of all steps when they are alike."""
        parts = (crude, *self._memory)
        weights = self._weights(parts, P_cru)
        if self.constants.homogeneous:
            return self._estimate_rows(pooled(parts, weights, alike=True))
        at_h = pooled([part.step(h) for part in parts], [_step(w, h) for w in weights])
        return self._estimate_rows(at_h)

    def _estimate_rows(self, counts: Counts) -> tuple[BoolArray, FloatArray]:
        """W and P~cru of pooled counts."""
        variance = counts.transition_variance[..., None]
        E = self._tolerance(float(variance.max()))
        N = counts.consistent(E, add_on=self.constants.add_on).transitions
        N = N + self.constants.crude_add_on * np.sqrt(1 + variance)
        W = infrequent(N, self._threshold(variance))
        return W, estimate_transition(N, W)

    def _weights(self, parts: Sequence[Evidence], P: FloatArray) -> Weights:
        """How parts are added, see `estimation`; P predicts how often they visit (h, x, a)."""
        if self.constants.weights == "batch":
            return batch_weights(parts)
        return visit_weights(parts, P, self.problem.d1)

    # -- Algorithm 3 ---------------------------------------------------------------------------

    def _fine_exploration(
        self, stage: Stage, crude: Crude
    ) -> Generator[Deployment, BatchCounts, Fine]:
        pi_ref = self._coverage_design(stage, crude)
        mixture = self._mixture(pi_ref, crude)
        batch = yield Deployment(stage.b, "fine", mixture, stage.fine, None)
        counts = self._evidence(of_batches([batch], [mixture]), crude.counts)
        estimator = self._estimator(crude, counts)
        return Fine(estimator.model(counts), counts, estimator, pi_ref)

    def _mixture(self, pi_ref: Design, crude: Crude) -> Mixture:
        """pi^ref and pi_0 in their shares and, once there is a model, what seems best in its."""
        share = self.constants.auxiliary_share
        pi_0 = self._thinned(crude.pi_0)
        uniform = np.full(len(pi_0), share / len(pi_0))
        policies = np.concatenate([pi_ref.policies, pi_0])
        weights = np.concatenate([(1 - share) * pi_ref.probabilities, uniform])
        if self._results:
            best, likely = self.constants.best_share, self.constants.likely_share
            found = self.phi.best(self._model).policy[None]
            policies = np.concatenate([policies, found, self._likely])
            shares = np.full(len(self._likely), likely / max(len(self._likely), 1))
            weights = np.concatenate([(1 - best - likely) * weights, [best], shares])
        return Mixture.from_probabilities(policies, weights)

    def _thinned(self, pi_0: PolicyArray) -> PolicyArray:
        """At most MOST_AUXILIARY of pi_0, drawn: a descriptor holds only so many policies."""
        if len(pi_0) <= MOST_AUXILIARY:
            return pi_0
        generator = generator_for(self.problem.seed, "auxiliary", len(self._results))
        chosen = generator.choice(len(pi_0), MOST_AUXILIARY, replace=False)
        return np.asarray(pi_0[np.sort(chosen)])

    def _evidence(self, fine: Evidence, crude: Evidence | None) -> tuple[Evidence, ...]:
        """The counts a stage's model is made of; kept for later stages only with `memory`.

        Every batch lengthens the bootstrap of every later stage, so the oldest are forgotten, which
        are the smallest.
        """
        parts = (fine, crude) if self.constants.pool and crude is not None else (fine,)
        parts = (*parts, *self._memory)
        if self.constants.memory:
            kept = max(1, MOST_REMEMBERED // fine.transitions.size)
            self._memory = parts[:kept]
        return parts

    def _coverage_design(self, stage: Stage, crude: Crude) -> Design:
        """Eq. 4; tuples that not one of the fine episodes is expected to reach are left out."""
        H = self.problem.sizes.H
        visits = [self._best_visits(crude.P, h, stage.fine) for h in range(H)]
        atoms = np.unique(np.concatenate(visits), axis=0)
        tolerance = self.constants.coverage_tolerance
        return design(self.phi, crude.P, atoms, floor=1 / stage.fine, tolerance=tolerance)

    def _estimator(self, crude: Crude, counts: tuple[Evidence, ...]) -> Estimator:
        """The estimator of a stage; its weights follow from the crude model, then from its own."""
        estimator = self._weighted(crude.W, counts, crude.P)
        if self.constants.weights == "batch":
            return estimator
        return self._weighted(crude.W, counts, estimator.model(counts).P)

    def _weighted(self, W: BoolArray, counts: tuple[Evidence, ...], P: FloatArray) -> Estimator:
        weights, alike = self._weights(counts, P), self.constants.homogeneous
        variance = pooled(counts, weights, alike=alike).transition_variance
        return Estimator(
            H=self.problem.sizes.H,
            W=W,
            E=self._tolerance(float(variance.max())),
            add_on=self.constants.add_on,
            least_visits=self.constants.least_visits,
            weights=weights,
            alike=alike,
            flow=self.constants.flow,
        )

    # -- levels --------------------------------------------------------------------------------

    def _precision(self, variance: float) -> float:
        """E of Assumption 4, over all counters of all batches of the run."""
        X, A, H = self.problem.sizes.X, self.problem.sizes.A, self.problem.sizes.H
        counters = len(self.schedule.stages) * 2 * H * X * A * (X + 2)
        return precision(variance, counters, self.problem.delta, self._term)

    def _tolerance(self, variance: float) -> float:
        """E as Eq. 7 and the add-on use it."""
        return self._precision(variance) if self.constants.levels == "paper" else 0.0

    def _threshold(self, variance: FloatArray) -> FloatArray | float:
        """Counts at or below it are infrequent (Algorithm 2, line 9)."""
        scale = self.constants.threshold_scale
        if self.constants.levels == "noise":
            return scale * np.sqrt(variance)
        return scale * self._precision(float(variance.max())) * self.problem.sizes.H**2 * self.iota


def _step(weight: FloatArray, h: int) -> FloatArray:
    return weight[h : h + 1] if weight.ndim else weight
