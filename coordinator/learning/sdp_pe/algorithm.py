"""SDP-PE, Algorithms 1-3 of paper 000: policy elimination from shuffled private counts.

The three algorithms are Python generators: they yield a deployment and receive its private counts.
Comments name the lines of the pseudocode. Methods below each algorithm make choices that the paper
leaves open, or in which `Constants` departs from the paper.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from riffle.common.mechanism.counters import Sizes
from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import generator_for
from riffle.coordinator.learning.evidence import (
    Counts,
    Evidence,
    Weights,
    batch_weights,
    evidence_of,
    pool,
    visit_weights,
)
from riffle.coordinator.learning.learner import (
    BatchCounts,
    BoolArray,
    Deployment,
    FloatArray,
    LearnerError,
    LearnerSummary,
    PolicyArray,
    Problem,
    StageResult,
)
from riffle.coordinator.learning.planning import Model
from riffle.coordinator.learning.postprocess import estimate_transition, precision
from riffle.coordinator.learning.sdp_pe.active import ActiveSet, all_policies
from riffle.coordinator.learning.sdp_pe.constants import PRACTICAL, Constants
from riffle.coordinator.learning.sdp_pe.coverage import Design, design
from riffle.coordinator.learning.sdp_pe.estimation import Estimator, bootstrap
from riffle.coordinator.learning.sdp_pe.schedule import Schedule, Stage, schedule_for

MOST_AUXILIARY = 512
"""The most policies of pi_0 (Algorithm 2) in a mixture, because a descriptor lists them all."""
MOST_REMEMBERED = 1_000_000
"""The largest number of counters that `memory` keeps: five batches with X=50, A=4, H=20."""

Steps = Generator[Deployment, BatchCounts, None]


@dataclass(frozen=True, slots=True)
class Crude:
    """The output of 000, Algorithm 2: W, P~cru (both H, X, A, X), policies pi_0 (M, H, X), counts.

    W marks the tuples (h, x, a, x') that are too rare to learn. P~cru is the crude model. `counts`
    is None if the stage had no crude batches.
    """

    W: BoolArray
    P: FloatArray
    pi_0: PolicyArray
    counts: Evidence | None


@dataclass(frozen=True, slots=True)
class Fine:
    """The output of Algorithm 3 of 000: the model (P~ref, r~), its counts, estimator and design."""

    model: Model
    counts: tuple[Evidence, ...]
    estimator: Estimator
    design: Design


def literal_radius(sizes: Sizes, L_b: int, E: float, iota: float, C: float) -> float:
    """Returns the radius (000, Algorithm 1, line 9) in units of value, with the paper's symbols."""
    X, A, H = sizes.X, sizes.A, sizes.H
    return 2 * C * (math.sqrt(X * A * H**3 * iota / L_b) + X**3 * A * H**5 * E * iota / L_b)


class SDPPE:
    """A `Learner` that runs SDP-PE (paper 000).

    Raises EnumerationTooLarge if the policies are too many for `enumerated` active sets. Raises
    LearnerError if K is too small for a stage, or if constants contradict each other. In the
    paper, the fine batch of a stage has `fine_batches` times the episodes of all crude batches.
    """

    fine_batches = 2

    def __init__(self, problem: Problem, constants: Constants = PRACTICAL) -> None:
        if not (constants.crude_every_stage or constants.memory):
            raise LearnerError("a stage without crude batches needs memory: set memory to true")
        if constants.likely_share > 0 and constants.radius != "bootstrap":
            raise LearnerError("likely_share needs the draws of radius bootstrap: set it to 0")
        self.problem = problem
        self.constants = constants
        self.phi: ActiveSet = all_policies(problem.sizes, problem.d1, constants.active_set)
        self.schedule: Schedule = schedule_for(problem, constants, self.fine_batches)
        X, A, H = problem.sizes.X, problem.sizes.A, problem.sizes.H
        self.iota = math.log(2 * H * A * problem.K / problem.delta)
        self._decisions = int(self.phi.actions.sum())
        self._model = Model(np.zeros((H, X, A, X)), np.zeros((H, X, A)))
        self._stages: list[StageResult] = []
        self._memory: tuple[Evidence, ...] = ()
        self._likely: PolicyArray = np.zeros((0, H, X), dtype=np.int64)
        self._episodes = 0
        self._term = 1.0
        self._steps = self._policy_elimination()
        self._pending: Deployment | None = next(self._steps)

    # -- Algorithm 1 ---------------------------------------------------------------------------

    def _policy_elimination(self) -> Steps:
        for stage in self.schedule.stages:  # lines 1-4
            if stage.crude:
                crude = yield from self._crude_exploration(stage)  # line 5
            else:
                crude = self._recall(stage)
            fine = yield from self._fine_exploration(stage, crude)  # line 6
            self._eliminate(stage, crude, fine)  # lines 7-13
        if self.schedule.exploit > 0:
            best = Mixture.single(self.phi.best(self._model).policy)
            last = len(self.schedule.stages) + 1
            yield Deployment(last, "exploit", best, self.schedule.exploit, 0)

    def _eliminate(self, stage: Stage, crude: Crude, fine: Fine) -> None:
        """Carries out lines 7-13 of Algorithm 1 of 000, and records the stage."""
        radius = self._radius(stage, fine)
        before = self.phi.size
        self.phi, best = self.phi.eliminate(fine.model, radius)
        after = self.phi.size
        # These policies were planned before this elimination, so some may now be eliminated.
        members = [self.phi.contains(policy) for policy in self._likely]
        self._likely = self._likely[np.array(members, dtype=np.bool_)]
        self._model = fine.model
        self._stages.append(
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
                E=self._precision(float(fine.counts[0].transition_variance.max())),
                infrequent=float(crude.W.mean()),
                coverage_gap=fine.design.gap,
                coverage_iterations=fine.design.iterations,
                policy=self.phi.best(fine.model).policy,
            )
        )

    # -- Algorithm 2 ---------------------------------------------------------------------------

    def _crude_exploration(self, stage: Stage) -> Generator[Deployment, BatchCounts, Crude]:
        X, A, H = self.problem.sizes.X, self.problem.sizes.A, self.problem.sizes.H
        P_cru = np.zeros((H, X, A, X))
        W = np.ones((H, X, A, X), dtype=np.bool_)
        mixtures: list[Mixture] = []
        batches: list[BatchCounts] = []
        policies: list[PolicyArray] = []
        for h in range(H):  # line 1
            pi_h = self._best_visits(P_cru, h, stage.crude[h])  # lines 3-5
            policies.append(pi_h)
            mixtures.append(Mixture.from_probabilities(pi_h, np.ones(len(pi_h))))
            counts = yield Deployment(stage.b, "crude", mixtures[h], stage.crude[h], h)  # lines 6-8
            batches.append(counts)
            steps = slice(None) if self.problem.homogeneous else slice(h, h + 1)
            crude = evidence_of(batches, mixtures)
            W[steps], P_cru[steps] = self._estimate_layer(h, crude, P_cru)  # lines 9-10
        pi_0 = np.concatenate(policies)  # line 12
        return Crude(W, P_cru, pi_0, crude)  # line 13

    def _recall(self, stage: Stage) -> Crude:
        """Returns the output of 000, Algorithm 2, from the counts of earlier stages alone."""
        H = self.problem.sizes.H
        weights = self._weights(self._memory, self._model.P)
        counts = pool(self._memory, weights, alike=self.problem.homogeneous)
        W, P = self._estimate_rows(counts)
        shape = (H, *W.shape[1:])
        P = np.broadcast_to(P, shape)
        policies = [self._best_visits(P, h, stage.fine) for h in range(H)]
        return Crude(np.broadcast_to(W, shape), P, np.concatenate(policies), None)

    def _best_visits(self, P: FloatArray, h: int, n: int) -> PolicyArray:
        """Returns policies (M, H, X): for each (x, a), the active one that visits (h, x, a) most.

        Leaves out each (x, a) for which n episodes of this policy are expected to make less than
        one visit. If that would leave out all (x, a), leaves out none.
        """
        best = self.phi.best_visits(P, h, self._model)
        reached = best.value * n >= 1
        if not reached.any():
            reached[:] = True
        return np.asarray(best.policy[reached])

    def _estimate_layer(
        self, h: int, crude: Evidence, P_cru: FloatArray
    ) -> tuple[BoolArray, FloatArray]:
        """Returns the infrequent tuples W and the transitions P~cru (000, Algorithm 2, lines 9-10).

        Both are of layer h or, if all steps are alike, of all steps together.
        """
        parts = (crude, *self._memory)
        weights = self._weights(parts, P_cru)
        if self.problem.homogeneous:
            return self._estimate_rows(pool(parts, weights, alike=True))
        weights = [w[h : h + 1] if w.ndim else w for w in weights]
        return self._estimate_rows(pool([part.step(h) for part in parts], weights))

    def _estimate_rows(self, counts: Counts) -> tuple[BoolArray, FloatArray]:
        variance = counts.transition_variance
        E = self._tolerance(float(variance.max()))
        N = counts.consistent(E, add_on=self.constants.add_on).transitions
        N = N + self.constants.crude_add_on * np.sqrt(1 + variance) * counts.possible
        W = counts.possible & (self._threshold(variance) >= N)
        return W, estimate_transition(N, W)

    # -- Algorithm 3 ---------------------------------------------------------------------------

    def _fine_exploration(
        self, stage: Stage, crude: Crude
    ) -> Generator[Deployment, BatchCounts, Fine]:
        pi_ref = self._coverage_design(stage, crude)  # line 1
        mixture = self._mixture(pi_ref, crude)
        batch = yield Deployment(stage.b, "fine", mixture, stage.fine, None)  # lines 2-4
        counts = self._evidence(evidence_of([batch], [mixture]), crude.counts)
        estimator = self._estimator(crude, counts)
        return Fine(estimator.model(counts), counts, estimator, pi_ref)  # lines 5-9

    def _coverage_design(self, stage: Stage, crude: Crude) -> Design:
        """Solves Eq. 4 of 000 for the (h, x, a) that `stage.fine` episodes reach at least once."""
        H = self.problem.sizes.H
        visits = [self._best_visits(crude.P, h, stage.fine) for h in range(H)]
        atoms = np.unique(np.concatenate(visits), axis=0)
        tolerance = self.constants.coverage_tolerance
        return design(self.phi, crude.P, atoms, floor=1 / stage.fine, tolerance=tolerance)

    def _mixture(self, pi_ref: Design, crude: Crude) -> Mixture:
        """Mixes `pi_ref` with `crude.pi_0`. Stages after the first add policies that seem best."""
        share = self.constants.auxiliary_share
        pi_0 = self._thin(crude.pi_0)
        uniform = np.full(len(pi_0), share / len(pi_0))
        policies = np.concatenate([pi_ref.policies, pi_0])
        weights = np.concatenate([(1 - share) * pi_ref.probabilities, uniform])
        if self._stages:
            best_share, likely_share = self.constants.best_share, self.constants.likely_share
            best = self.phi.best(self._model).policy[None]
            policies = np.concatenate([policies, best, self._likely])
            shares = np.full(len(self._likely), likely_share / max(len(self._likely), 1))
            others = (1 - best_share - likely_share) * weights
            weights = np.concatenate([others, [best_share], shares])
        return Mixture.from_probabilities(policies, weights)

    def _thin(self, pi_0: PolicyArray) -> PolicyArray:
        """Draws at most MOST_AUXILIARY policies of pi_0."""
        if len(pi_0) <= MOST_AUXILIARY:
            return pi_0
        generator = generator_for(self.problem.seed, "auxiliary", len(self._stages))
        chosen = generator.choice(len(pi_0), MOST_AUXILIARY, replace=False)
        return np.asarray(pi_0[np.sort(chosen)])

    def _evidence(self, fine: Evidence, crude: Evidence | None) -> tuple[Evidence, ...]:
        """Returns the counts that a stage's model uses; `memory` keeps them for later stages.

        Every kept batch slows all later bootstraps, so the oldest batches are forgotten.
        """
        parts = (fine, crude) if self.constants.pool and crude is not None else (fine,)
        parts = (*parts, *self._memory)
        if self.constants.memory:
            self._memory = parts[: max(1, MOST_REMEMBERED // fine.transitions.size)]
        return parts

    def _estimator(self, crude: Crude, counts: tuple[Evidence, ...]) -> Estimator:
        """Returns a stage's estimator. With weights `visits`, a first estimator predicts visits."""
        estimator = self._weighted_estimator(crude.W, counts, crude.P)
        if self.constants.weights == "batch":
            return estimator
        return self._weighted_estimator(crude.W, counts, estimator.model(counts).P)

    def _weighted_estimator(
        self, W: BoolArray, counts: tuple[Evidence, ...], P: FloatArray
    ) -> Estimator:
        weights, alike = self._weights(counts, P), self.problem.homogeneous
        variance = pool(counts, weights, alike=alike).transition_variance
        return Estimator(
            H=self.problem.sizes.H,
            W=W,
            E=self._tolerance(float(variance.max())),
            add_on=self.constants.add_on,
            least_visits=self.constants.least_visits,
            weights=weights,
            alike=alike,
            flow=self.constants.flow,
            shrinkage=self.constants.shrinkage,
        )

    def _weights(self, parts: Sequence[Evidence], P: FloatArray) -> Weights:
        """Returns the parts' weights (`evidence`). P predicts how often a part visits (h, x, a)."""
        if self.constants.weights == "batch":
            return batch_weights(parts)
        return visit_weights(parts, P, self.problem.d1)

    # -- Levels: the radius, E and the threshold of W ------------------------------------------

    def _radius(self, stage: Stage, fine: Fine) -> float:
        """Returns the elimination radius. A bootstrap also finds the policies that may be best."""
        if self.constants.radius == "paper":
            E = self._precision(float(fine.counts[0].transition_variance.max()))
            return self._worst_case(stage.L_b, E)
        resampled = bootstrap(
            generator_for(self.problem.seed, "bootstrap", stage.b),
            fine.counts,
            fine.estimator,
            self.phi,
            level=1 - self.problem.delta / len(self.schedule.stages),
            families=self.problem.families,
        )
        self._likely = resampled.likely
        return self.constants.radius_scale * resampled.radius

    def _worst_case(self, L_b: int, E: float) -> float:
        scale = self.constants.radius_scale
        return literal_radius(self.problem.sizes, L_b, E, self.iota, scale)

    def _precision(self, variance: float) -> float:
        """Returns E of paper 000, Assumption 4, for all counters of all batches of the run."""
        X, A, H = self.problem.sizes.X, self.problem.sizes.A, self.problem.sizes.H
        counters = len(self.schedule.stages) * 2 * H * X * A * (X + 2)
        return precision(variance, counters, self.problem.delta, self._term)

    def _tolerance(self, variance: float) -> float:
        """Returns the precision E for Eq. 7 of paper 000 and for its add-on."""
        return self._precision(variance) if self.constants.levels == "paper" else 0.0

    def _threshold(self, variance: FloatArray) -> FloatArray | float:
        """Returns the count up to which (h, x, a, x') is infrequent (000, Algorithm 2, line 9)."""
        scale = self.constants.threshold_scale
        if self.constants.levels == "noise":
            return scale * np.sqrt(variance)
        return scale * self._precision(float(variance.max())) * self.problem.sizes.H**2 * self.iota

    # -- The Learner protocol ------------------------------------------------------------------

    def next_deployment(self) -> Deployment | None:
        """Returns the next deployment; None when all K episodes are used."""
        return self._pending

    def observe(self, counts: BatchCounts) -> StageResult | None:
        """Takes the current deployment's counts. Returns the stage's result if they end a stage."""
        self._check(counts)
        stages = len(self._stages)
        self._episodes += counts.n
        self._term = max(self._term, counts.term)
        try:
            self._pending = self._steps.send(counts)
        except StopIteration:
            self._pending = None
        return self._stages[-1] if len(self._stages) > stages else None

    def summary(self) -> LearnerSummary:
        """Returns the best policy of the last active set under the last stage's model."""
        best = self.phi.best(self._model)
        return LearnerSummary(
            policy=best.policy,
            value_estimate=float(best.value),
            active=self.phi.size,
            stage=len(self._stages),
            episodes_used=self._episodes,
            episodes_total=self.problem.K,
            finished=self._pending is None,
            constants=asdict(self.constants),
            radius=self._stages[-1].radius if self._stages else None,
        )

    def _check(self, counts: BatchCounts) -> None:
        if self._pending is None:
            raise LearnerError("the run is over: there is no deployment these counts belong to")
        n, layout = self._pending.n, self.problem.layout(self._pending.layer)
        if (counts.n, counts.layout) != (n, layout):
            raise LearnerError(
                f"expected counts of n={n} and {layout}, got n={counts.n} and {counts.layout}"
            )
