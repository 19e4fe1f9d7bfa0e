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
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from common.counters import CounterLayout
from common.policy import Mixture
from common.randomness import generator_for
from coordinator.learning.absorbing import BoolArray, estimate_transition, infrequent
from coordinator.learning.coverage import Design, design
from coordinator.learning.enumeration import ActivePolicies, Model
from coordinator.learning.estimation import Estimator, Evidence, of_batches, pooled
from coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    FloatArray,
    LearnerError,
    LearnerSummary,
    PolicyArray,
    Problem,
    StageResult,
)
from coordinator.learning.presets import PRACTICAL, Constants
from coordinator.learning.radius import bootstrap_radius, literal_radius
from coordinator.learning.schedule import Schedule, Stage, schedule
from coordinator.postprocess import precision

Steps = Generator[Deployment, BatchCounts, None]


@dataclass(frozen=True, slots=True)
class Crude:
    """What Algorithm 2 returns: W, P~cru (H, X, A, X), the atoms (M, H, X) of pi_0, its counts."""

    W: BoolArray
    P: FloatArray
    pi_0: PolicyArray
    counts: Evidence


@dataclass(frozen=True, slots=True)
class Fine:
    """What Algorithm 3 returns: the model (P~ref, r~), with its counts, estimator and design."""

    model: Model
    counts: tuple[Evidence, ...]
    estimator: Estimator
    design: Design


class SDPPE:
    """One run of SDP-PE over a `Problem`; a `Learner`.

    Raises EnumerationTooLarge when the policies are too many to enumerate, and LearnerError when K
    is too small for a stage.
    """

    def __init__(self, problem: Problem, constants: Constants = PRACTICAL) -> None:
        self.problem = problem
        self.constants = constants
        self.phi = ActivePolicies.everything(problem.sizes, problem.d1)
        self.schedule: Schedule = schedule(
            problem.K, problem.sizes.H, constants, _first_stage(problem, constants)
        )
        X, A, H = problem.sizes.X, problem.sizes.A, problem.sizes.H
        self.iota = math.log(2 * H * A * problem.K / problem.delta)
        self._model = Model(np.zeros((H, X, A, X)), np.zeros((H, X, A)))
        self._results: list[StageResult] = []
        self._memory: tuple[Evidence, ...] = ()
        self._used = 0
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
            crude = yield from self._crude_exploration(stage)
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
        self._model = fine.model
        self._results.append(
            StageResult(
                stage=stage.b,
                L_b=stage.L_b,
                episodes=stage.episodes,
                active_before=before,
                active_after=self.phi.size,
                eliminated=before - self.phi.size,
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
            E = self._precision(fine.counts[0].transition_variance)
            return literal_radius(self.problem.sizes, stage.L_b, E, self.iota, scale)
        level = 1 - self.problem.delta / len(self.schedule.stages)
        generator = generator_for(self.problem.seed, "bootstrap", stage.b)
        shared = self.problem.families != "paper"
        return scale * bootstrap_radius(
            generator, fine.counts, fine.estimator, self.phi, level=level, summed_visits=shared
        )

    # -- Algorithm 2 ---------------------------------------------------------------------------

    def _crude_exploration(self, stage: Stage) -> Generator[Deployment, BatchCounts, Crude]:
        X, A, H = self.problem.sizes.X, self.problem.sizes.A, self.problem.sizes.H
        P_cru = np.zeros((H, X, A, X))
        W = np.ones((H, X, A, X), dtype=np.bool_)
        atoms: list[PolicyArray] = []
        batches: list[BatchCounts] = []
        for h in range(H):
            pi_h = self._best_visits(P_cru, h, stage.crude[h])
            mixture = Mixture.from_probabilities(pi_h, np.ones(len(pi_h)))
            counts = yield Deployment(stage.b, "crude", mixture, stage.crude[h], h)
            atoms.append(pi_h)
            batches.append(counts)
            steps = slice(None) if self.constants.homogeneous else slice(h, h + 1)
            W[steps], P_cru[steps] = self._estimate_layer(h, of_batches(batches))
        return Crude(W, P_cru, np.concatenate(atoms), of_batches(batches))

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

    def _estimate_layer(self, h: int, crude: Evidence) -> tuple[BoolArray, FloatArray]:
        """Lines 9-10: W and P~cru of layer h, or of all steps when they are alike."""
        parts = (crude, *self._memory)
        alike = self.constants.homogeneous
        counts = pooled([part.over_steps() if alike else part.step(h) for part in parts])
        variance = counts.transition_variance
        add_on = self.constants.add_on
        N = counts.consistent(self._tolerance(variance), add_on=add_on).transitions
        N = N + self.constants.crude_add_on * math.sqrt(1 + variance)
        W = infrequent(N, self._threshold(variance))
        return W, estimate_transition(N, W)

    # -- Algorithm 3 ---------------------------------------------------------------------------

    def _fine_exploration(
        self, stage: Stage, crude: Crude
    ) -> Generator[Deployment, BatchCounts, Fine]:
        pi_ref = self._coverage_design(stage, crude)
        policies = np.concatenate([pi_ref.policies, crude.pi_0])
        share = self.constants.auxiliary_share
        uniform = np.full(len(crude.pi_0), share / len(crude.pi_0))
        mixture = Mixture.from_probabilities(
            policies, np.concatenate([(1 - share) * pi_ref.probabilities, uniform])
        )
        batch = yield Deployment(stage.b, "fine", mixture, stage.fine, None)
        counts = self._evidence(of_batches([batch]), crude.counts)
        estimator = self._estimator(crude.W, counts)
        return Fine(estimator.model(counts), counts, estimator, pi_ref)

    def _evidence(self, fine: Evidence, crude: Evidence) -> tuple[Evidence, ...]:
        """The counts a stage's model is made of; kept for later stages only with `memory`."""
        parts = (fine, crude) if self.constants.pool else (fine,)
        parts = (*parts, *self._memory)
        if self.constants.memory:
            self._memory = parts
        if self.constants.homogeneous:
            return tuple(part.over_steps() for part in parts)
        return parts

    def _coverage_design(self, stage: Stage, crude: Crude) -> Design:
        """Eq. 4; tuples that not one of the fine episodes is expected to reach are left out."""
        H = self.problem.sizes.H
        visits = [self._best_visits(crude.P, h, stage.fine) for h in range(H)]
        atoms = np.unique(np.concatenate(visits), axis=0)
        tolerance = self.constants.coverage_tolerance
        return design(self.phi, crude.P, atoms, floor=1 / stage.fine, tolerance=tolerance)

    def _estimator(self, W: BoolArray, counts: tuple[Evidence, ...]) -> Estimator:
        variances = pooled(counts)
        return Estimator(
            H=self.problem.sizes.H,
            W=W,
            E=self._tolerance(variances.transition_variance),
            add_on=self.constants.add_on,
            least_visits=self.constants.least_visits * math.sqrt(variances.visit_variance),
        )

    # -- levels --------------------------------------------------------------------------------

    def _precision(self, variance: float) -> float:
        """E of Assumption 4, over all counters of all batches of the run."""
        X, A, H = self.problem.sizes.X, self.problem.sizes.A, self.problem.sizes.H
        counters = len(self.schedule.stages) * 2 * H * X * A * (X + 2)
        return precision(variance, counters, self.problem.delta)

    def _tolerance(self, variance: float) -> float:
        """E as Eq. 7 and the add-on use it."""
        return self._precision(variance) if self.constants.levels == "paper" else 0.0

    def _threshold(self, variance: float) -> float:
        """Counts at or below it are infrequent (Algorithm 2, line 9)."""
        scale = self.constants.threshold_scale
        if self.constants.levels == "noise":
            return scale * math.sqrt(variance)
        return scale * self._precision(variance) * self.problem.sizes.H**2 * self.iota


def _first_stage(problem: Problem, constants: Constants) -> int:
    """L_1: as configured, or enough for `visits_per_noise` (see `Constants`)."""
    if constants.first_stage > 0:
        return constants.first_stage
    X, A, H = problem.sizes.X, problem.sizes.A, problem.sizes.H
    deviation = max(1.0, math.sqrt(problem.noise(max(problem.K // (3 * H), 1), 0)))
    return math.ceil(constants.visits_per_noise * deviation * H * X * A)
