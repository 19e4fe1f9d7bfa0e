"""Simulates a population exactly by its counts, so a batch takes the same time for any n.

Users are exchangeable, so it is enough to count users by (policy, state) at each step. The result
has exactly the law of n users' counts, except for noise that overflows a report's padding. The
accountant includes the probability of an overflow in beta.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from riffle.common.mechanism.counters import CounterLayout, Families, Ints, Support
from riffle.common.mechanism.parameters import BatchNoise, FairBits, Flips, Laplace, Noise, Padding
from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import generator_for
from riffle.common.mechanism.workflow import debias
from riffle.coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    Learner,
    LearnerSummary,
    StageResult,
    batch_counts,
)
from riffle.node_client.environments.tabular import TabularMDP


@dataclass(frozen=True, slots=True)
class Mechanism:
    """The calibrated noise and padding of a batch; `noise` is None without privacy."""

    noise: BatchNoise | None
    padding: Padding


Calibrate = Callable[[CounterLayout, int], Mechanism]


@dataclass(frozen=True, slots=True)
class Run:
    """A finished simulated run. `messages` is the sum of n * L over its batches."""

    learner: Learner
    deployments: list[Deployment]
    stages: list[StageResult]
    summary: LearnerSummary
    messages: int


def run_batches(
    learner: Learner, count: Callable[[int, Deployment], tuple[BatchCounts, int]]
) -> Run:
    """Runs a learner to its end.

    ``count`` takes the number of a deployment and the deployment. It returns the private counts and
    the number of messages of a report.
    """
    deployments: list[Deployment] = []
    stages: list[StageResult] = []
    messages = 0
    while (deployment := learner.next_deployment()) is not None:
        counts, a_report = count(len(deployments), deployment)
        stage = learner.observe(counts)
        stages.extend([stage] if stage is not None else [])
        messages += deployment.n * a_report
        deployments.append(deployment)
    return Run(learner, deployments, stages, learner.summary(), messages)


def joint_counts(mdp: TabularMDP, mixture: Mixture, n: int, generator: np.random.Generator) -> Ints:
    """Draws the true counts N_h(x, a, x', r) of n users under a mixture: (H, X, A, X, 2)."""
    X, A, H = mdp.sizes.X, mdp.sizes.A, mdp.sizes.H
    users = generator.multinomial(n, mixture.probabilities)
    standing = generator.multinomial(users, mdp.d1)
    x = np.broadcast_to(np.arange(X), standing.shape)
    N = np.zeros((H, X, A, X), dtype=np.int64)
    for h in range(H):
        actions = mixture.policies[:, h, :]
        rows = mdp.P[h][x, actions]  # scaled to sum to one, which the multinomial demands
        moves = generator.multinomial(standing, rows / rows.sum(axis=-1, keepdims=True))
        np.add.at(N[h], (x, actions), moves)
        standing = moves.sum(axis=1)
    ones = generator.binomial(N, mdp.r[..., None])
    return np.stack([N - ones, ones], axis=-1)


def counters(layout: CounterLayout, N: Ints) -> Ints:
    """Returns the counters (C,) of a layout from joint counts N (H, X, A, X, 2).

    Raises ValueError if a count is outside the layout's support.
    """
    if layout.layer is not None:
        N = N[layout.layer : layout.layer + 1]
    families = {
        "joint": N,
        "transitions": N.sum(axis=-1),
        "visits": N.sum(axis=(-2, -1)),
        "rewards": N[..., 1].sum(axis=-1),
    }
    return layout.join(families)


def private_counts(
    mdp: TabularMDP,
    deployment: Deployment,
    layout: CounterLayout,
    noise: BatchNoise | None,
    generator: np.random.Generator,
) -> BatchCounts:
    """Draws the debiased private counts of one deployment. All users are honest."""
    n = deployment.n
    counts = counters(layout, joint_counts(mdp, deployment.mixture, n, generator))
    if noise is None:
        return batch_counts(layout, n, counts.astype(np.float64), 0.0)
    noisy = noisy_counts(counts, n, noise, generator)
    debiased = debias(noise, n, np.append(noisy, n))
    return batch_counts(layout, n, debiased, noise.variance(n), noise.term)


def noisy_counts(counts: Ints, n: int, noise: BatchNoise, generator: np.random.Generator) -> Ints:
    """Draws the analyzer's counts (C,), with their exact law, given the true counts of n users."""
    match noise:
        case Noise():
            return counts + generator.binomial(n * noise.bits, noise.p, size=counts.shape)
        case Flips():
            unflipped = generator.binomial(counts, 1.0 - noise.f)
            return np.asarray(unflipped + generator.binomial(n - counts, noise.f))
        case Laplace():
            up, down = generator.geometric(1.0 - noise.q, size=(2, *counts.shape))
            return np.asarray(counts + up - down)
        case FairBits():
            return counts + generator.binomial(noise.bits, 0.5, size=counts.shape)


def simulate(
    mdp: TabularMDP,
    learner: Learner,
    families: Families,
    calibrate: Calibrate,
    seed: int,
    support: Support | None = None,
) -> Run:
    """Runs a learner to its end. Every draw has the key (seed, batch number).

    Raises ValueError if an episode is outside the declared support.
    """

    def count(number: int, deployment: Deployment) -> tuple[BatchCounts, int]:
        layout = CounterLayout(mdp.sizes, families, deployment.layer, support)
        mechanism = calibrate(layout, deployment.n)
        generator = generator_for(seed, "batch", number)
        counts = private_counts(mdp, deployment, layout, mechanism.noise, generator)
        return counts, mechanism.padding.messages

    return run_batches(learner, count)
