"""Runs of 004's algorithms: exact regret, learning, privacy's price, calibrations."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest

from riffle.common.protocol.errors import LocalError
from riffle.coordinator.learning.adversarial import uc_o_reps, uob_lbps
from riffle.coordinator.learning.adversarial.layered import (
    Layers,
    best_policy,
    state_action,
    uniform_policy,
)
from riffle.coordinator.learning.adversarial.uob_lbps import LossEstimate
from riffle.experiments import adversarial
from riffle.experiments.adversarial import guarantee, learn, play, regret_curve, run
from riffle.experiments.adversaries import (
    Adversary,
    Algorithm,
    Case,
    Privacy,
    adversary_losses,
    world,
)
from riffle.experiments.regret import optimal_value
from riffle.node_client.environments.registry import exact_mdp, make
from tests.coordinator.learning.adversarial import (
    confidence_oracle,
    log_barrier_oracle,
    omd_oracle,
)
from tests.coordinator.learning.adversarial.worlds import SHAPES, random_policy, transitions
from tests.experiments import two_arms

SMALL = (1, 2, 2, 1)
BETA = 1e-5


def test_regret_is_brute_force_over_all_policies() -> None:
    case = Case("uc-o-reps", 30, 1.0, BETA, "none", "paper", 1, widths=SMALL)
    here = world(case)
    layers, P, losses = here.layers, here.P, adversary_losses(case, here)
    policies, _ = learn(case, layers, P, losses)
    episodes, regret = regret_curve(layers, P, policies, losses)
    states = [tuple(state) for state in np.argwhere(layers.states)]
    fixed = []
    for actions in itertools.product(range(layers.A), repeat=len(states)):
        policy = np.zeros(layers.pairs.shape)
        for (h, x), a in zip(states, actions, strict=True):
            policy[h, x, a] = 1.0
        fixed.append((state_action(P, policy) * losses).sum(axis=(1, 2, 3)))
    suffered = (state_action(P, policies) * losses).sum(axis=(1, 2, 3))
    for k, value in zip(episodes.astype(int), regret, strict=True):
        best = min(series[:k].sum() for series in fixed)
        assert value == pytest.approx(suffered[:k].sum() - best, abs=1e-9)


@pytest.mark.parametrize("name", ["uc-o-reps", "uob-lbps"])
def test_regret_of_an_episode_falls(name: Algorithm) -> None:
    """Mean over four seeds: the last third loses less an episode than the first."""
    early, late = [], []
    for seed in range(4):
        result = run(
            Case(name, 600, 1.0, BETA, "none", "paper", seed, adversary="stochastic", widths=SMALL)
        )
        third = len(result.cumulative) // 3
        early.append(result.cumulative[third] / result.episodes[third])
        late.append(
            (result.cumulative[-1] - result.cumulative[-third])
            / (result.episodes[-1] - result.episodes[-third])
        )
    assert np.mean(late) < 0.8 * np.mean(early)


@pytest.mark.parametrize("privacy", ["central", "local"])
def test_privacy_costs_regret(privacy: Privacy) -> None:
    def mean(kind: Privacy) -> float:
        case = partial(Case, "uc-o-reps", 400, 1.0, BETA, kind, "exact", adversary="stochastic")
        return float(np.mean([run(case(seed=seed)).regret for seed in range(4)]))

    assert mean("none") < 0.8 * mean(privacy)


def test_learning_beats_chance() -> None:
    result = run(Case("uc-o-reps", 400, 1.0, BETA, "none", "paper", 0, adversary="stochastic"))
    assert result.regret < 0.7 * result.uniform_regret


def test_little_privacy_is_as_good_as_none() -> None:
    loose = run(Case("uc-o-reps", 200, 1e7, BETA, "central", "paper", 2, widths=SMALL))
    none = run(Case("uc-o-reps", 200, 1.0, BETA, "none", "exact", 2, widths=SMALL))
    assert loose.regret == pytest.approx(none.regret, rel=0.02, abs=0.2)


@pytest.mark.parametrize("name", ["uc-o-reps", "uob-lbps"])
@pytest.mark.parametrize("privacy", ["none", "central", "local"])
@pytest.mark.parametrize("calibration", ["paper", "exact"])
def test_every_combination_runs_and_reproduces(name: str, privacy: str, calibration: str) -> None:
    case = Case(name, 16, 1.0, BETA, privacy, calibration, 7, adversary="drifting", widths=SMALL)  # type: ignore[arg-type]
    first, again = run(case), run(case)
    np.testing.assert_array_equal(first.cumulative, again.cumulative)
    assert first.constants == again.constants
    assert first.constants["calibration"] == calibration
    assert first.episodes[-1] == 16


def test_the_papers_calibration_states_its_real_epsilon() -> None:
    layers = Layers((1, 3, 3, 3, 1), 2)  # H = 4, XA = 20 pairs
    assert guarantee(False, layers, "paper", 1.0) == pytest.approx(2.0)
    assert guarantee(True, layers, "paper", 1.0) == pytest.approx((4 * 4 + 20) / 12)
    assert guarantee(True, layers, "exact", 1.0) == 1.0
    result = run(Case("uc-o-reps", 4, 1.0, BETA, "none", "paper", 0))
    assert result.constants["epsilon_given"] == math.inf


def test_noise_scales_are_those_of_the_document() -> None:
    jdp = run(Case("uc-o-reps", 64, 0.5, BETA, "central", "paper", 0, widths=SMALL)).constants
    assert jdp["count_noise"] == f"laplace {3 * 3 * 6 / 0.5:.6g}"
    bandit = run(Case("uob-lbps", 64, 0.5, BETA, "central", "paper", 0, widths=SMALL)).constants
    assert bandit["loss_noise"] == f"laplace {3 * 3 / 0.5:.6g}"


@pytest.mark.parametrize("adversary", get_args(Adversary))
def test_losses_are_oblivious_and_in_range(adversary: Adversary) -> None:
    """Neither the learner nor its privacy changes a loss."""
    case = Case("uc-o-reps", 40, 1.0, BETA, "none", "paper", 1, adversary)
    here = world(case)
    layers, losses = here.layers, adversary_losses(case, here)
    assert losses.min() >= 0
    assert losses.max() <= 1
    assert not losses[:, ~layers.pairs].any()
    other = replace(case, name="uob-lbps", privacy="local", calibration="exact", epsilon=0.1)
    np.testing.assert_array_equal(adversary_losses(other, here), losses)
    another_seed = replace(case, seed=2)
    assert (adversary_losses(another_seed, here) != losses).any()


def test_the_means_of_adversaries_move_as_named() -> None:
    """Means of each quarter of K = 20,000 losses, 20 pairs: standard error at most 1/141 each.

    Bounds on means of quarters, and on their differences, are 6 and more standard errors.
    """
    quarter = {}
    for adversary in get_args(Adversary):
        case = Case("uc-o-reps", 20_000, 1.0, BETA, "none", "paper", 3, adversary)
        here = world(case)
        losses = adversary_losses(case, here)[:, here.layers.pairs]
        quarter[adversary] = losses.reshape(4, 5_000, -1).mean(axis=1)
    steps = {name: np.diff(means, axis=0) for name, means in quarter.items()}
    assert np.abs(steps["stochastic"]).max() < 0.06
    assert np.median(np.abs(steps["switching"])) > 0.1  # of two uniform draws: 0.29
    assert np.median(np.abs(steps["drifting"].sum(axis=0))) > 0.1  # three quarters of 0.29
    assert np.abs(np.diff(steps["drifting"], axis=0)).max() < 0.1
    assert np.abs(np.diff(steps["switching"], axis=0)).max() > 0.3


@pytest.mark.parametrize("adversary", get_args(Adversary))
def test_every_adversary_punishes_playing_at_random(adversary: Adversary) -> None:
    """There is a fixed policy to learn: at random, a tenth of a loss more an episode (H = 4)."""
    for seed in range(3):
        case = Case("uc-o-reps", 2_000, 1.0, BETA, "none", "paper", seed, adversary)
        here = world(case)
        layers, P, losses = here.layers, here.P, adversary_losses(case, here)
        random = np.broadcast_to(uniform_policy(layers), losses.shape)
        assert regret_curve(layers, P, random, losses)[1][-1] > 0.1 * case.K


def test_the_corrected_estimator_learns_which_of_two_arms_is_best() -> None:
    """Regret an episode falls with K and is below uniform play's, at epsilon = 1,000.

    Measured: 0.058 (standard deviation over seeds 0.029) at K = 400, 0.027 (0.008) at 8,000;
    uniform play 0.09 and 0.10. The two means differ by four standard errors: right code fails with
    other seeds in 1 of 30,000 trials.
    """
    short = np.mean([two_arms.regret(400, seed, "correct") for seed in range(24)], axis=0)
    long = np.mean([two_arms.regret(8_000, seed, "correct") for seed in range(3)], axis=0)
    assert long[0] < short[0] < short[1]
    assert long[0] < 0.5 * long[1]


def test_the_literal_estimator_is_worse_than_uniform_play_on_two_arms() -> None:
    """It stays with the first arm and loses 0.22 an episode (standard deviation 0.008)."""
    literal = np.mean([two_arms.regret(4_000, seed, "paper") for seed in range(2)], axis=0)
    assert literal[0] > 1.8 * literal[1]


@pytest.mark.parametrize("visited", [0.0, 1.0])
def test_only_the_corrected_estimate_has_a_mean_proportional_to_the_loss(visited: float) -> None:
    """Means of 40,000 draws; bounds are five standard errors, so 1 of a million trials fails."""
    noise = np.random.default_rng(1).normal(0.0, 2.0, 40_000)
    error = 5 * 2.0 / math.sqrt(len(noise))
    correct, paper = (
        LossEstimate(name, E=10.0, variance=4.0)(visited + noise).mean()
        for name in ("correct", "paper")
    )
    assert correct * math.sqrt(5) == pytest.approx(visited, abs=error)
    assert paper * 21 == pytest.approx(visited + 10, abs=error)  # Eq. 4.1 charges E' when unvisited


@pytest.mark.parametrize("name", ["riverswim", "spectrum"])
def test_an_mdp_of_ones_own_keeps_its_values(name: str) -> None:
    """The best fixed policy against the losses 1 - r loses H - V*, unrolled in time or not."""
    environment = {"riverswim": "RiverSwim-v0", "spectrum": "SpectrumAccess-v0"}[name]
    case = Case("uniform", 2, 1.0, BETA, "none", "paper", 0, "rewards", environment=environment)
    here, mdp = world(case), exact_mdp(make(environment))
    _, least = best_policy(here.layers, here.P, (1 - here.r) * here.decisions)
    assert least == pytest.approx(mdp.sizes.H - optimal_value(mdp))
    np.testing.assert_allclose(here.P.sum(axis=-1)[here.layers.pairs], 1.0)


def test_a_random_start_is_a_layer_without_losses() -> None:
    case = Case("uniform", 50, 1.0, BETA, "none", "paper", 0, environment="SpectrumAccess-v0")
    here = world(case)
    assert here.layers.widths[:2] == (1, 4)
    assert not adversary_losses(case, here)[:, 0].any()
    assert adversary_losses(case, here)[:, 1].any()


def test_states_that_a_step_cannot_reach_are_left_out() -> None:
    """RiverSwim starts at its left end and moves by at most one state a step."""
    case = Case("uniform", 2, 1.0, BETA, "none", "paper", 0, environment="RiverSwim-v0")
    assert world(case).layers.widths == (1, 2, 3, 4, 4, 4, 1)


def test_a_learner_of_losses_learns_an_mdp_of_ones_own() -> None:
    """Three arms of known means, without privacy: less than 0.7 of uniform play's regret.

    Measured on seeds 0 to 9: between 0.2 and 0.5.
    """
    arms = (("actions", 3), ("means", [0.2, 0.5, 0.9]), ("sigma", 0.0))
    result = run(
        Case("uc-o-reps", 400, 1.0, BETA, "none", "paper", 0, "rewards",
             environment="Bandit-v0", parameters=arms)
    )  # fmt: skip
    assert result.regret < 0.7 * result.uniform_regret


def test_uniform_play_is_the_reference_of_every_run() -> None:
    case = Case("uc-o-reps", 30, 1.0, BETA, "none", "paper", 3, widths=SMALL)
    assert run(replace(case, name="uniform")).regret == run(case).uniform_regret


def test_unknown_names_and_numbers_are_refused() -> None:
    with pytest.raises(LocalError, match="uc-o-reps"):
        run(Case("o-reps", 10, 1.0, BETA, "none", "paper", 0))  # type: ignore[arg-type]
    with pytest.raises(LocalError, match="epsilon"):
        run(Case("uc-o-reps", 10, 0.0, BETA, "none", "paper", 0))


def oracle_play(generator: np.random.Generator, P: np.ndarray, policy: np.ndarray) -> np.ndarray:
    """One episode by cumulative sums; two uniforms a step."""
    visited, x = np.zeros(P.shape), 0
    for h, (u, w) in enumerate(generator.random((len(policy), 2))):
        a = int((np.cumsum(policy[h, x])[:-1] <= u).sum())
        y = int((np.cumsum(P[h, x, a])[:-1] <= w).sum())
        visited[h, x, a, y] = 1.0
        x = y
    return visited


@pytest.mark.parametrize("case", range(24))
def test_an_episode_equals_the_oracles_draw_by_draw(case: int) -> None:
    generator = np.random.default_rng(case)
    layers = Layers(SHAPES[case % len(SHAPES)], 2)
    P, policy = transitions(layers, generator), random_policy(layers, generator)
    one, other = np.random.default_rng(case), np.random.default_rng(case)
    for _ in range(20):
        assert np.array_equal(play(one, P, policy), oracle_play(other, P, policy))


@pytest.mark.parametrize("name", ["uc-o-reps", "uob-lbps"])
def test_a_run_equals_the_oracles_run(name: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are taken in another order, so the two agree to rounding."""
    compiled = run(Case(name, 100, 1.0, 1e-5, "central", "exact", 3))
    monkeypatch.setattr(uc_o_reps, "ftrl_step", omd_oracle.ftrl_step)
    monkeypatch.setattr(uc_o_reps, "confidence_set", confidence_oracle.confidence_set)
    monkeypatch.setattr(uob_lbps, "log_barrier_step", log_barrier_oracle.log_barrier_step)
    monkeypatch.setattr(uob_lbps, "upper_occupancy", confidence_oracle.upper_occupancy)
    monkeypatch.setattr(adversarial, "play", oracle_play)
    plain = run(Case(name, 100, 1.0, 1e-5, "central", "exact", 3))
    np.testing.assert_allclose(compiled.cumulative, plain.cumulative, atol=1e-6)
