"""The population's law is the law of single users; batches cost the same at any size."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2

from riffle.common.mechanism.counters import CounterLayout, Episode, Sizes
from riffle.common.mechanism.parameters import (
    BatchNoise,
    CentralNoise,
    FairBits,
    Flips,
    Laplace,
    Noise,
    Padding,
)
from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import SeededRandomness
from riffle.common.mechanism.workflow import debias
from riffle.coordinator.learning.learner import Deployment, Problem
from riffle.coordinator.learning.planning import occupancy
from riffle.coordinator.learning.sdp_pe.algorithm import SDPPE
from riffle.coordinator.learning.sdp_pe.constants import PRACTICAL
from riffle.experiments.regret import regret
from riffle.experiments.simulator import (
    Mechanism,
    counters,
    joint_counts,
    noisy_counts,
    private_counts,
    simulate,
)
from riffle.node_client.environments.tabular import TabularMDP, riverswim
from tests.common.mechanism.roles import central_counts, local_counts

ALPHA = 1e-4
"""Level of each chi-square test here; seeds are fixed."""


def _mixture(mdp: TabularMDP, seed: int) -> Mixture:
    generator = np.random.default_rng(seed)
    shape = (5, mdp.sizes.H, mdp.sizes.X)
    return Mixture.from_probabilities(generator.integers(0, 2, shape), generator.uniform(size=5))


def _one_user(mdp: TabularMDP, mixture: Mixture, generator: np.random.Generator) -> Episode:
    H, X = mdp.sizes.H, mdp.sizes.X
    policy = mixture.pick(int(generator.integers(2**32)))
    states, actions, rewards = np.zeros(H + 1, int), np.zeros(H, int), np.zeros(H, int)
    states[0] = generator.choice(X, p=mdp.d1)
    for h in range(H):
        x = states[h]
        actions[h] = policy[h, x]
        rewards[h] = generator.uniform() < mdp.r[h, x, actions[h]]
        states[h + 1] = generator.choice(X, p=mdp.P[h, x, actions[h]])
    return Episode(states, actions, rewards)


def _mdp() -> TabularMDP:
    base = riverswim(3, 3)
    return TabularMDP(base.P, np.clip(base.r + 0.3, 0, 1), np.array([0.5, 0.3, 0.2]))


def _two_sample(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """p-value of the chi-square test that two count vectors have one law."""
    keep = a + b >= 10
    a, b = a[keep].astype(float), b[keep].astype(float)
    ka, kb = np.sqrt(b.sum() / a.sum()), np.sqrt(a.sum() / b.sum())
    statistic = (((ka * a - kb * b) ** 2) / (a + b)).sum()
    return float(chi2.sf(statistic, keep.sum() - 1))


def test_population_counts_have_the_law_of_single_users() -> None:
    """Trajectory law, step by step: chi-square at level 1e-4 a step, on 4,000 users."""
    mdp, n = _mdp(), 4000
    mixture = _mixture(mdp, 3)
    layout = CounterLayout(mdp.sizes, "joint")
    generator = np.random.default_rng(5)
    users = np.zeros(layout.counters, dtype=np.int64)
    for _ in range(n):
        users[layout.encode(_one_user(mdp, mixture, generator))] += 1
    crowd = counters(layout, joint_counts(mdp, mixture, n, np.random.default_rng(6)))
    assert users.sum() == crowd.sum() == n * mdp.sizes.H
    steps = zip(users.reshape(3, -1), crowd.reshape(3, -1), strict=True)
    assert all(_two_sample(a, b) > ALPHA for a, b in steps)


def test_counts_flow_and_match_the_occupancy() -> None:
    mdp, n = _mdp(), 10**9
    mixture = _mixture(mdp, 1)
    N = joint_counts(mdp, mixture, n, np.random.default_rng(2))
    moves = N.sum(axis=-1)
    assert np.array_equal(moves[:-1].sum(axis=(1, 2)), moves[1:].sum(axis=(2, 3)))
    assert (moves.sum(axis=(1, 2, 3)) == n).all()
    d = np.tensordot(mixture.probabilities, occupancy(mdp.P, mdp.d1, mixture.policies), 1)
    assert np.allclose(moves.sum(axis=-1) / n, d, atol=6 / np.sqrt(n))
    share = N[..., 1].sum(axis=-1) / np.maximum(moves.sum(axis=-1), 1)
    assert np.allclose(share[d > 0.01], mdp.r[d > 0.01], atol=1e-3)


def test_layouts_are_sums_of_the_same_counts() -> None:
    mdp = _mdp()
    N = joint_counts(mdp, _mixture(mdp, 1), 1000, np.random.default_rng(2))
    paper = CounterLayout(mdp.sizes, "paper").split(
        counters(CounterLayout(mdp.sizes, "paper"), N).astype(float)
    )
    assert np.array_equal(paper["transitions"].sum(-1), paper["visits"])
    assert np.array_equal(paper["rewards"], N[..., 1].sum(-1))
    layer = counters(CounterLayout(mdp.sizes, "lean", 1), N)
    assert np.array_equal(layer, paper["transitions"][1].ravel())


def test_noise_is_unbiased_with_the_stated_variance() -> None:
    """288 counters: the mean within 4.5 and the variance within 30 % (5 standard errors)."""
    mdp = riverswim()
    noise = Noise(3, 1, 5)
    deployment = Deployment(1, "fine", _mixture(mdp, 4), 5000, None)
    layout = CounterLayout(mdp.sizes, "joint")
    noisy = private_counts(mdp, deployment, layout, noise, np.random.default_rng(7))
    clean = private_counts(mdp, deployment, layout, None, np.random.default_rng(7))
    difference = (noisy.transitions - clean.transitions).ravel()
    variance = float(noisy.transition_variance.mean())
    assert abs(difference.mean()) < 4.5 * np.sqrt(variance / difference.size)
    assert abs(difference.var() / variance - 1) < 0.5


@pytest.mark.parametrize(
    "noise", [Flips(round(0.3 * 2**32)), Laplace(3 * 2**30), FairBits(40)], ids=str
)
def test_noise_of_the_other_workflows_has_the_law_of_the_roles(noise: BatchNoise) -> None:
    """30 users and the coordinator, role by role, 1,000 times: chi-square at level 1e-4 a counter.

    Counters that no user feeds, that some do and that all do: flips treat them differently.
    """
    layout, n, times = CounterLayout(Sizes(2, 1, 1), "joint"), 30, 1_000
    zero = np.zeros(1, dtype=np.int64)
    stay, leave = (Episode(np.array([0, y]), zero, zero) for y in (0, 1))
    episodes: list[Episode | None] = [*[stay] * 20, *[leave] * 10]
    randomness = SeededRandomness.keyed(1, str(noise))
    true = np.bincount(np.concatenate([layout.encode(e) for e in episodes if e]), minlength=8)
    if isinstance(noise, Flips):
        found = [local_counts(layout, noise, episodes, randomness) for _ in range(times)]
    else:
        assert isinstance(noise, CentralNoise)
        found = [central_counts(layout, noise, episodes, randomness) for _ in range(times)]
    generator = np.random.default_rng(2)
    drawn = [noisy_counts(true, n, noise, generator) for _ in range(times)]
    debiased = [debias(noise, n, np.append(noisy, n)) for noisy in drawn]
    for roles, law in zip(np.array(found).T, np.array(debiased).T, strict=True):
        values = np.unique(np.round([roles, law], 6))
        both = [np.searchsorted(values, np.round(side, 6)) for side in (roles, law)]
        a, b = (np.bincount(side, minlength=values.size) for side in both)
        assert _two_sample(a, b) > ALPHA


def _run(K: int, seed: int = 1) -> tuple[float, int, float]:
    mdp = riverswim(4, 4)
    noise = Noise(1, 1, 6)
    problem = Problem(
        mdp.sizes, mdp.d1, K, 1.0, 1e-5, 0.05, "joint", lambda n, layer: noise.variance(n)
    )
    learner = SDPPE(problem, PRACTICAL)
    start = time.process_time()
    run = simulate(mdp, learner, "joint", lambda layout, n: Mechanism(noise, Padding(6, 4)), seed)
    seconds = time.process_time() - start
    assert sum(d.n for d in run.deployments) == K
    assert run.messages == 10 * K
    curve = regret(mdp, run.deployments)
    return curve.total, curve.switches, seconds


def test_runs_are_reproduced_by_their_seed() -> None:
    assert _run(5000, 3)[:2] == _run(5000, 3)[:2]
    assert _run(5000, 3)[0] != _run(5000, 4)[0]


def test_a_billion_users_cost_as_much_as_a_thousand() -> None:
    assert _run(10**9)[2] < 20
