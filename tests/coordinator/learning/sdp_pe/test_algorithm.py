"""SDP-PE: replay and accounting, its answer without noise, and its stated rates with noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from riffle.common.mechanism.counters import CounterLayout, Families
from riffle.common.mechanism.parameters import Noise
from riffle.coordinator.learning.learner import (
    Deployment,
    Learner,
    LearnerError,
    Problem,
    StageResult,
)
from riffle.coordinator.learning.planning import occupancy, plan
from riffle.coordinator.learning.sdp_pe import algorithm
from riffle.coordinator.learning.sdp_pe.algorithm import SDPPE
from riffle.coordinator.learning.sdp_pe.constants import PAPER, PRACTICAL, Constants
from riffle.experiments.simulator import private_counts
from riffle.node_client.environments.tabular import TabularMDP, riverswim
from tests.coordinator.learning.worlds import suboptimality

NoiseOf = Callable[[int, int | None], Noise | None]


def light(n: int, layer: int | None) -> Noise | None:
    """A variance of 20 on every counter, whatever the batch."""
    return Noise(bits=max(1, round(20 * 1024 / n)), p_numerator=1, p_log2=10)


def honest(n: int, layer: int | None) -> Noise | None:
    """About epsilon=1, beta=1e-5 with the joint family: 28 a counter for a layer, 140 for five."""
    variance = 140 if layer is None else 28
    return Noise(bits=max(1, round(variance * 1024 / n)), p_numerator=1, p_log2=10)


def absent(n: int, layer: int | None) -> Noise | None:
    """No privacy."""
    return None


def problem(mdp: TabularMDP, K: int, noise_of: NoiseOf, **changes: object) -> Problem:
    """A problem whose noise model is that of `noise_of`."""

    def variance(n: int, layer: int | None) -> float:
        noise = noise_of(n, layer)
        return 0.0 if noise is None else noise.variance(n)

    base = Problem(mdp.sizes, mdp.d1, K, 1.0, 1e-5, 0.05, "joint", variance)
    return replace(base, **changes)  # type: ignore[arg-type]


def counted(active: int | None) -> int:
    """The size of an enumerated set."""
    assert active is not None
    return active


def drive(
    mdp: TabularMDP, learner: Learner, families: Families, noise_of: NoiseOf, seed: int
) -> tuple[list[Deployment], list[StageResult]]:
    deployments: list[Deployment] = []
    stages: list[StageResult] = []
    generator = np.random.default_rng(seed)
    while (deployment := learner.next_deployment()) is not None:
        assert learner.next_deployment() is deployment
        layout = CounterLayout(mdp.sizes, families, deployment.layer)
        noise = noise_of(deployment.n, deployment.layer)
        stage = learner.observe(private_counts(mdp, deployment, layout, noise, generator))
        deployments.append(deployment)
        stages += [] if stage is None else [stage]
    return deployments, stages


@pytest.mark.parametrize("constants", [PAPER, PRACTICAL], ids=lambda c: c.name)
@pytest.mark.parametrize("families", ["paper", "lean", "joint"])
def test_every_episode_is_accounted_for(constants: Constants, families: Families) -> None:
    mdp = riverswim(3, 3)
    learner = SDPPE(problem(mdp, 1501, light, families=families), constants)
    deployments, stages = drive(mdp, learner, families, light, 1)
    assert sum(d.n for d in deployments) == 1501 == learner.summary().episodes_used
    assert learner.summary().finished
    assert sum(s.episodes for s in stages) + learner.schedule.exploit == 1501
    for stage in stages:
        batches = [d for d in deployments if d.stage == stage.stage]
        crude = 3 if stage.stage == 1 or constants.crude_every_stage else 0
        assert [d.layer for d in batches] == [*range(crude), None]
        assert [d.purpose for d in batches] == ["crude"] * crude + ["fine"]
        assert stage.coverage_gap <= constants.coverage_tolerance


def test_the_papers_constants_run_and_eliminate_nothing() -> None:
    mdp = riverswim()
    learner = SDPPE(problem(mdp, 20_000, light), PAPER)
    _, stages = drive(mdp, learner, "joint", light, 2)
    assert [s.L_b for s in stages][:4] == [2, 4, 8, 16]
    assert all(s.eliminated == 0 and s.infrequent == 1.0 for s in stages)
    assert learner.summary().active == 2**21


def test_crude_exploration_drops_pairs_that_no_policy_reaches() -> None:
    """All users start at the left end: both actions there get half of the first batch.

    Algorithm 2 gives a share to six other pairs, too, whose policies are arbitrary.
    """
    learner = SDPPE(problem(riverswim(), 20_000, light), PAPER)
    first = learner.next_deployment()
    assert first is not None
    assert (first.purpose, first.layer) == ("crude", 0)
    taken = first.mixture.policies[:, 0, 0]
    shares = np.bincount(taken, weights=first.mixture.probabilities, minlength=2)
    np.testing.assert_allclose(shares, (0.5, 0.5))


@pytest.mark.parametrize("H", [1, 2, 3, 6, 20])
def test_lemma_15_holds_with_one_transition_less_than_steps(H: int) -> None:
    """Both ends of Lemma 14, at every step: visits differ by (1 +- 1/H)^(h-1), not to the power H.

    At H = 1 the paper's (1 - 1/H)^H is 0, and the lemma's 1/4 would not follow.
    """
    mdp = riverswim(4, H)
    policy = np.ones((H, 4), dtype=np.int64)
    crude = occupancy(mdp.P, mdp.d1, policy)
    for factor in (1 - 1 / H, 1 + 1 / H):
        visits = occupancy(factor * mdp.P, mdp.d1, policy)
        assert (crude / 4 <= visits + 1e-12).all()
        assert (visits <= 3 * crude + 1e-12).all()
    assert ((1 - 1 / H) ** H >= 1 / 4) == (H > 1)


def test_replaying_the_observations_reproduces_the_run() -> None:
    mdp = riverswim(4, 4)
    same_problem = problem(mdp, 3000, light, seed=5)
    first, again = SDPPE(same_problem), SDPPE(same_problem)
    generator = np.random.default_rng(4)
    while (deployment := first.next_deployment()) is not None:
        replayed = again.next_deployment()
        assert replayed is not None
        assert replayed.mixture.same_as(deployment.mixture)
        layout = CounterLayout(mdp.sizes, "joint", deployment.layer)
        counts = private_counts(mdp, deployment, layout, light(deployment.n, None), generator)
        a, b = first.observe(counts), again.observe(counts)
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.radius, a.active_after) == (b.radius, b.active_after)
    assert np.array_equal(first.summary().policy, again.summary().policy)


def test_wrong_counts_and_late_counts_are_refused() -> None:
    mdp = riverswim(2, 2)
    learner = SDPPE(problem(mdp, 300, light))
    deployment = learner.next_deployment()
    assert deployment is not None
    generator = np.random.default_rng(1)
    wrong = CounterLayout(mdp.sizes, "joint", 1)
    with pytest.raises(LearnerError, match="expected counts of n="):
        learner.observe(private_counts(mdp, deployment, wrong, light(10, None), generator))
    drive(mdp, learner, "joint", light, 1)
    layout = CounterLayout(mdp.sizes, "joint", 0)
    with pytest.raises(LearnerError, match="the run is over"):
        learner.observe(
            private_counts(mdp, deployment, layout, light(deployment.n, None), generator)
        )


def test_without_noise_and_with_many_episodes_the_optimum_is_all_that_is_left() -> None:
    mdp = riverswim(4, 5)
    optimal = plan(mdp.P, mdp.r, mdp.d1).policy
    learner = SDPPE(problem(mdp, 1_000_000, absent), PRACTICAL)
    _, stages = drive(mdp, learner, "joint", absent, 1)
    summary = learner.summary()
    assert suboptimality(mdp, summary.policy) < 0.005
    assert counted(summary.active) < 2**13
    assert all(counted(s.active_after) <= counted(s.active_before) for s in stages)
    assert learner.phi.contains(optimal)


def test_the_optimal_policy_survives_at_honest_noise() -> None:
    """40 runs at a noise of variance 140 a counter (epsilon=1, beta=1e-5: joint, all five steps).

    Stated rate: at least 95 %. With a true rate of 85 % or less, 38 or more survivors of 40 have a
    chance below 5 %; seeds are fixed, so the test does not flicker.
    """
    mdp = riverswim(4, 5)
    optimal = plan(mdp.P, mdp.r, mdp.d1).policy
    survived = eliminated = 0
    for seed in range(40):
        learner = SDPPE(problem(mdp, 20_000, honest, seed=seed, homogeneous=True))
        _, stages = drive(mdp, learner, "joint", honest, seed)
        survived += learner.phi.contains(optimal)
        eliminated += counted(stages[-1].active_after) < 2**16
    assert survived >= 38
    assert eliminated >= 30


def test_a_time_homogeneous_problem_pools_its_steps() -> None:
    """Bandit-like check: one state, means equal at every step; pooling finds the best arm."""
    H, A = 5, 4
    r = np.repeat(np.array([[[0.2, 0.5, 0.45, 0.1]]]), H, axis=0)
    mdp = TabularMDP(np.ones((H, 1, A, 1)), r, np.ones(1))
    learner = SDPPE(problem(mdp, 20_000, honest, homogeneous=True))
    drive(mdp, learner, "joint", honest, 3)
    assert suboptimality(mdp, learner.summary().policy) < 0.1


def test_the_bandit_is_a_special_case() -> None:
    means = np.append(np.linspace(0.05, 0.75, 19), 0.9)
    mdp = TabularMDP(np.ones((1, 1, 20, 1)), means[None, None], np.ones(1))
    active = []
    for seed in range(9, 14):
        learner = SDPPE(problem(mdp, 20_000, honest))
        _, stages = drive(mdp, learner, "joint", honest, seed)
        assert int(learner.summary().policy[0, 0]) == 19
        active.append(counted(stages[-1].active_after))
    assert min(active) <= 10


def test_with_one_state_all_exploration_is_fine() -> None:
    mdp = TabularMDP(np.ones((1, 1, 20, 1)), np.linspace(0, 1, 20)[None, None], np.ones(1))
    learner = SDPPE(problem(mdp, 20_000, honest))
    assert [stage.crude for stage in learner.schedule.stages][:2] == [(16,), ()]


def test_the_best_policy_takes_its_share_of_later_fine_batches() -> None:
    mdp = riverswim(3, 3)
    learner = SDPPE(problem(mdp, 20_000, light))
    deployments, stages = drive(mdp, learner, "joint", light, 1)
    fine = [d for d in deployments if d.purpose == "fine"]
    for before, deployment in zip(stages, fine[1:], strict=False):
        same = (deployment.mixture.policies == before.policy).all(axis=(1, 2))
        share = float(deployment.mixture.probabilities[same].sum())
        assert share >= PRACTICAL.best_share - 1e-9


def test_likely_policies_need_the_bootstraps_draws() -> None:
    with pytest.raises(LearnerError, match="likely_share"):
        SDPPE(problem(riverswim(), 20_000, light), replace(PRACTICAL, radius="paper"))


def test_forgetting_needs_crude_batches_in_every_stage() -> None:
    with pytest.raises(LearnerError, match="memory"):
        SDPPE(problem(riverswim(), 20_000, light), replace(PRACTICAL, memory=False))


def test_a_K_that_is_too_small_is_refused() -> None:
    with pytest.raises(LearnerError, match="Raise K"):
        SDPPE(problem(riverswim(), 50, light))


def test_the_demo_learns() -> None:
    """RiverSwim-v0, K=8,000, noise of epsilon=1, beta=1e-5: 19 of 20 seeds within 5 % of V*."""
    mdp = riverswim()
    demo = replace(PRACTICAL, exploit_share=0.25)

    def noise_of(n: int, layer: int | None) -> Noise:
        return Noise(max(1, round((169 if layer is None else 28.5) * 1024 / n)), 1, 10)

    good = 0
    for seed in range(20):
        learner = SDPPE(problem(mdp, 8000, noise_of, seed=seed, homogeneous=True), demo)
        drive(mdp, learner, "joint", noise_of, seed)
        good += suboptimality(mdp, learner.summary().policy) < 0.05
    assert good >= 19


@pytest.mark.parametrize("representation", ["enumerated", "implicit"])
def test_every_policy_deployed_is_active(representation: str) -> None:
    """Policies likely to be best are deployed only while they are active."""
    mdp = riverswim(3, 4)
    constants = replace(PRACTICAL, active_set=representation, radius_scale=0.1)  # type: ignore[arg-type]
    learner = SDPPE(problem(mdp, 12_000, light), constants)
    generator = np.random.default_rng(1)
    eliminated = 0
    while (deployment := learner.next_deployment()) is not None:
        assert all(learner.phi.contains(policy) for policy in deployment.mixture.policies)
        layout = CounterLayout(mdp.sizes, "joint", deployment.layer)
        noise = light(deployment.n, deployment.layer)
        stage = learner.observe(private_counts(mdp, deployment, layout, noise, generator))
        eliminated += stage is not None and stage.decisions_eliminated > 0
    assert eliminated > 1


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the two newest batches are kept; without the bound, every stage would add one."""
    mdp = riverswim(3, 3)
    size = mdp.P.size
    monkeypatch.setattr(algorithm, "MOST_REMEMBERED", 2 * size)
    learner = SDPPE(problem(mdp, 30_000, light))
    deployments, stages = drive(mdp, learner, "joint", light, 1)
    assert len(stages) > 2
    fine = [d.n for d in deployments if d.purpose == "fine"]
    assert [part.n for part in learner._memory] == fine[:-3:-1]


@pytest.mark.parametrize("levels", ["paper", "noise"])
def test_precision_grows_with_the_terms_of_the_noise(levels: str) -> None:
    """E, the literal radius and the levels of W: terms are large under trust local and central."""
    mdp = riverswim(3, 3)
    constants = replace(PRACTICAL, levels=levels, radius="paper", likely_share=0.0)  # type: ignore[arg-type]
    observed: list[tuple[float, float, float]] = []
    for term in (1.0, 100.0):
        learner = SDPPE(problem(mdp, 2000, light), constants)
        generator, stage = np.random.default_rng(1), None
        while stage is None:
            deployment = learner.next_deployment()
            assert deployment is not None
            layout = CounterLayout(mdp.sizes, "joint", deployment.layer)
            noise = light(deployment.n, deployment.layer)
            counts = private_counts(mdp, deployment, layout, noise, generator)
            stage = learner.observe(replace(counts, term=term))
        observed.append((stage.E, stage.radius, learner._tolerance(1.0)))
    few, many = observed
    assert many[0] > few[0] + 4 * 98 * 2 / 3
    assert many[1] > few[1]
    assert (many[2] > few[2]) == (levels == "paper")
