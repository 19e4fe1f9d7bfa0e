"""The conference variant: 2 L_b episodes a stage, every (h, x, a) explored alike, its radius."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from riffle.common.mechanism.counters import Families
from riffle.common.mechanism.parameters import Padding
from riffle.coordinator.learning.learner import Deployment, LearnerError, Problem
from riffle.coordinator.learning.sdp_pe.conference import ConferenceSDPPE
from riffle.coordinator.learning.sdp_pe.constants import PAPER, PRACTICAL, Constants
from riffle.experiments.regret import optimal_value, policy_value
from riffle.experiments.simulator import Mechanism, Run, simulate
from riffle.node_client.environments.tabular import TabularMDP, riverswim


def silent(mdp: TabularMDP, K: int, families: Families = "joint") -> Problem:
    return Problem(mdp.sizes, mdp.d1, K, 1.0, 1e-5, 0.05, families, lambda n, layer: 0.0)


def run(K: int, constants: Constants, mdp: TabularMDP) -> Run:
    learner = ConferenceSDPPE(silent(mdp, K), constants)
    return simulate(mdp, learner, "joint", lambda layout, n: Mechanism(None, Padding(1, 0)), 3)


@pytest.mark.parametrize("constants", [PAPER, PRACTICAL], ids=lambda c: str(c.name))
@pytest.mark.parametrize("K", [500, 4_001, 20_000])
def test_every_episode_is_accounted_for(K: int, constants: Constants) -> None:
    done = run(K, constants, riverswim(X=3, H=3))
    assert sum(d.n for d in done.deployments) == K
    assert done.summary.finished
    assert done.summary.episodes_used == K


def test_a_stage_is_L_b_crude_and_L_b_fine_episodes() -> None:
    mdp = riverswim(X=3, H=2)
    stages = ConferenceSDPPE(silent(mdp, 10_000), PAPER).schedule.stages
    for stage in stages[:-1]:
        assert stage.L_b == 2**stage.b
        assert (sum(stage.crude), stage.fine) == (stage.L_b, stage.L_b)
    left = 10_000 - 2 * sum(stage.L_b for stage in stages[:-1])
    assert stages[-1].L_b == left // 2


def deployments(purpose: str, done: Run) -> list[Deployment]:
    return [d for d in done.deployments if d.purpose == purpose]


def test_fine_exploration_is_uniform_over_the_policies_of_pairs() -> None:
    mdp = riverswim(X=3, H=3)
    only = replace(PRACTICAL, exploit_share=0.0, best_share=0.0, likely_share=0.0)
    done = run(8_000, only, mdp)
    X, A, H = mdp.sizes.X, mdp.sizes.A, mdp.sizes.H
    for fine in deployments("fine", done):
        shares = fine.mixture.probabilities
        # Equal policies are merged: every weight is a multiple of one policy's share.
        assert len(shares) <= H * X * A
        pieces = shares / shares.min()
        whole = min(np.abs(pieces * m - np.rint(pieces * m)).max() for m in range(1, H * X * A + 1))
        assert whole < 1e-5


def test_the_worst_case_radius_written_out() -> None:
    mdp = riverswim(X=3, H=2)
    learner = ConferenceSDPPE(silent(mdp, 10_000), PAPER)
    X, A, H, L_b, E, iota = 3, 2, 2, 64, 5.0, learner.iota
    sampling = math.sqrt(H**5 * X**2 * A * iota / L_b)
    noise = X**3 * A**2 * H**5 * E * iota / L_b
    assert learner._worst_case(L_b, E) == pytest.approx(2 * (sampling + noise))


def test_its_design_covers_worse_than_the_optimal_one_by_a_bounded_factor() -> None:
    mdp = riverswim(X=3, H=3)
    done = run(20_000, replace(PRACTICAL, exploit_share=0.0), mdp)
    X, A, H = mdp.sizes.X, mdp.sizes.A, mdp.sizes.H
    for stage in done.stages:
        # Eq. 20 of 003: d_mu / d_pi <= 12 H X A for every tuple, hence on average over them.
        assert 0.0 <= stage.coverage_gap + 1 <= 12 * H * X * A


def test_without_noise_it_finds_the_optimum() -> None:
    mdp = riverswim(X=3, H=3)
    done = run(200_000, PRACTICAL, mdp)
    assert policy_value(mdp, done.summary.policy) == pytest.approx(optimal_value(mdp), rel=0.02)


def test_a_K_that_is_too_small_is_refused() -> None:
    with pytest.raises(LearnerError, match="Raise K"):
        ConferenceSDPPE(silent(riverswim(), 20), PRACTICAL)
