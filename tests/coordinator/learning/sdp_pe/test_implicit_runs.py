"""Whole runs of SDP-PE with implicit active sets: against enumeration, and beyond it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from riffle.common.mechanism.counters import CounterLayout
from riffle.common.mechanism.parameters import Noise, Padding
from riffle.common.protocol.descriptor import MAX_POLICIES
from riffle.coordinator.learning.learner import Problem
from riffle.coordinator.learning.planning import Model, plan
from riffle.coordinator.learning.sdp_pe.active import ImplicitPolicies
from riffle.coordinator.learning.sdp_pe.algorithm import MOST_AUXILIARY, SDPPE, Crude, Fine
from riffle.coordinator.learning.sdp_pe.conference import ConferenceSDPPE
from riffle.coordinator.learning.sdp_pe.constants import PRACTICAL, Constants
from riffle.coordinator.learning.sdp_pe.coverage import Design
from riffle.coordinator.learning.sdp_pe.enumeration import EnumeratedPolicies
from riffle.coordinator.learning.sdp_pe.schedule import Stage
from riffle.experiments.regret import optimal_value, regret
from riffle.experiments.simulator import Mechanism, Run, simulate
from riffle.node_client.environments.registry import exact_mdp, make
from riffle.node_client.environments.tabular import TabularMDP, riverswim
from tests.coordinator.learning.worlds import is_exact, suboptimality


def honest(layout: CounterLayout, n: int) -> Mechanism:
    """About epsilon = 1, beta = 1e-5 with the joint family: 28 a counter and layer."""
    noise = Noise(bits=max(1, round(28 * layout.layers * 1024 / n)), p_numerator=1, p_log2=10)
    return Mechanism(noise, Padding(layout.data_slots, 0))


def problem(mdp: TabularMDP, K: int, seed: int) -> Problem:
    def variance(n: int, layer: int | None) -> float:
        noise = honest(CounterLayout(mdp.sizes, "joint", layer), n).noise
        return 0.0 if noise is None else noise.variance(n)

    return Problem(mdp.sizes, mdp.d1, K, 1.0, 1e-5, 0.05, "joint", variance, seed)


def run(mdp: TabularMDP, K: int, seed: int, constants: Constants) -> Run:
    return simulate(mdp, SDPPE(problem(mdp, K, seed), constants), "joint", honest, seed)


def random(states: int, actions: int, horizon: int, seed: int) -> TabularMDP:
    sizes = {"states": states, "actions": actions, "horizon": horizon}
    return exact_mdp(make("RandomMDP-v0", seed=seed, **sizes))


WORLDS = {
    "RiverSwim-v0": (riverswim(4, 6), 60_000),
    "random X=3 A=2 H=4": (random(3, 2, 4, 2), 50_000),
    "random X=2 A=3 H=4": (random(2, 3, 4, 5), 50_000),
}


@pytest.mark.parametrize("world", WORLDS)
def test_runs_agree_with_enumeration(world: str) -> None:
    """Equal seeds give an equal first stage; later the two may deploy different mixtures.

    Tolerances: no learned policy is worse by more than 2 % of V*, and the mean regrets of three
    runs are within a quarter of each other (they differ by that much between seeds).
    """
    mdp, K = WORLDS[world]
    regrets, eliminated = [], 0
    for seed in range(3):
        enumerated = run(mdp, K, seed, PRACTICAL)
        implicit = run(mdp, K, seed, replace(PRACTICAL, active_set="implicit"))
        assert implicit.stages[0].radius == enumerated.stages[0].radius
        assert all(stage.active_after is stage.eliminated is None for stage in implicit.stages)
        assert implicit.summary.active is None
        eliminated += implicit.stages[-1].decisions_eliminated
        losses = [suboptimality(mdp, each.summary.policy) for each in (enumerated, implicit)]
        assert losses[1] <= losses[0] + 0.02 * optimal_value(mdp)
        both = (enumerated, implicit)
        regrets.append([regret(mdp, done.deployments).total for done in both])
    assert eliminated > 0
    listed_mean, kept_mean = np.mean(regrets, axis=0)
    assert kept_mean == pytest.approx(listed_mean, rel=0.25)


class Beside(SDPPE):
    """A run by enumeration that gives every stage's model and radius to an implicit set too."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, PRACTICAL)
        self.implicit = ImplicitPolicies.all_policies(problem.sizes, problem.d1)
        self.sizes: list[int] = []

    def _eliminate(self, stage: Stage, crude: Crude, fine: Fine) -> None:
        super()._eliminate(stage, crude, fine)
        assert isinstance(self.phi, EnumeratedPolicies)
        self.implicit, _ = self.implicit.eliminate(fine.model, self._stages[-1].radius)
        member = np.ones(self.phi.shape, dtype=np.bool_)
        for constraint in self.implicit.inequalities:
            member &= self.phi.values(constraint.model) >= constraint.least
        enumerated = np.ones_like(member) if self.phi.active is None else self.phi.active
        assert not (enumerated & ~member).any()
        assert not (self.phi.actions & ~self.implicit.actions).any()
        assert self.implicit.contains(self.phi.best(fine.model).policy)
        if is_exact(self.implicit):
            assert np.array_equal(enumerated, member)
        self.sizes.append(int(enumerated.sum()))


@pytest.mark.parametrize("world", WORLDS)
def test_every_stage_keeps_all_that_enumeration_keeps(world: str) -> None:
    """Compares all classes of policies, on the same models and radii."""
    mdp, K = WORLDS[world]
    learner = Beside(problem(mdp, K, 0))
    simulate(mdp, learner, "joint", honest, 0)
    assert len(learner.sizes) > 3
    assert learner.sizes[-1] < learner.sizes[0] / 2


def test_beyond_enumeration_the_optimum_is_found_and_kept() -> None:
    """X=8, A=3, H=6 has 3^48 policies; policies to deploy fit a descriptor."""
    mdp = random(8, 3, 6, 1)
    learner = SDPPE(problem(mdp, 600_000, 1))
    finished = simulate(mdp, learner, "joint", honest, 1)
    assert isinstance(learner.phi, ImplicitPolicies)
    assert suboptimality(mdp, finished.summary.policy) <= 0.01 * optimal_value(mdp)
    assert learner.phi.contains(plan(mdp.P, mdp.r, mdp.d1).policy)
    assert finished.stages[-1].decisions_eliminated > 0
    assert max(len(d.mixture.weights) for d in finished.deployments) <= MAX_POLICIES
    gaps = [stage.coverage_gap for stage in finished.stages]
    assert min(gaps) >= -1e-9


def test_mixtures_too_large_for_a_descriptor_are_thinned() -> None:
    """X=20, A=3, H=12 has 720 tuples (h, x, a), so as many policies in pi_0."""
    mdp = random(20, 3, 12, 1)
    learner = SDPPE(problem(mdp, 60_000, 1))
    finished = simulate(mdp, learner, "joint", honest, 1)
    fine = [len(d.mixture.weights) for d in finished.deployments if d.purpose == "fine"]
    assert fine
    assert all(MOST_AUXILIARY / 2 < count <= 2 * MOST_AUXILIARY for count in fine)


def test_the_conference_variant_runs_with_implicit_sets() -> None:
    mdp = random(8, 3, 4, 3)
    finished = simulate(mdp, ConferenceSDPPE(problem(mdp, 100_000, 1)), "joint", honest, 1)
    assert finished.summary.active is None
    assert suboptimality(mdp, finished.summary.policy) <= 0.02 * optimal_value(mdp)


class WithGaps(ConferenceSDPPE):
    """Notes each design's gap, and the gap that no active policy can exceed."""

    gaps: list[tuple[float, float]]

    def _coverage_design(self, stage: Stage, crude: Crude) -> Design:
        found = super()._coverage_design(stage, crude)
        reward = np.divide(1.0, found.visits, out=np.zeros_like(found.visits), where=found.reached)
        most = self.phi.bound(Model(crude.P, reward)) / found.reached.sum() - 1.0
        self.gaps.append((found.gap, most))
        return found


def test_a_coverage_gap_is_at_least_the_distance_from_the_optimum() -> None:
    """An implicit set may miss the policy that reaches the supremum of Eq. 4."""
    mdp = random(8, 3, 4, 3)
    learner = WithGaps(problem(mdp, 100_000, 1))
    learner.gaps = []
    simulate(mdp, learner, "joint", honest, 1)
    assert len(learner.gaps) > 3
    assert all(gap >= most - 1e-9 for gap, most in learner.gaps)
