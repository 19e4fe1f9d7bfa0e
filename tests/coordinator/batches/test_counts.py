"""Histograms to counts: the sums of each choice of families, bias, variances, value estimates."""

import math
from dataclasses import replace

import numpy as np
import pytest

from riffle.common.mechanism.counters import CounterLayout, Episode, Families
from riffle.common.mechanism.parameters import Noise
from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import SeededRandomness, generator_for
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.coordinator.batches.counts import private_counts, value_estimate
from riffle.coordinator.batches.issue import Issuer, noise_variance
from riffle.coordinator.learning.learner import BatchCounts, Deployment
from tests.coordinator.world import RUN, SHUFFLER_ID, spec, toy_episode

POLICY = np.array([[0, 1], [1, 0]])
N = 60


def batch(families: Families, layer: int | None) -> BatchDescriptor:
    deployment = Deployment(0, "manual", Mixture.single(POLICY), N, layer)
    issuer = Issuer(SHUFFLER_ID, lambda: "0" * 64, lambda: 0.0)
    wanted = spec(families=families, epsilon=2.0)
    return issuer.issue(RUN, wanted, deployment, index=0, step=0).descriptor


def episodes(seed: int) -> list[Episode]:
    return [toy_episode(POLICY, SeededRandomness.keyed(seed, slot)) for slot in range(N)]


def counted(d: BatchDescriptor, seed: int) -> BatchCounts:
    """Counts of one batch; the noise of all users is one binomial for each counter."""
    data = np.concatenate([d.layout.encode(episode) for episode in episodes(seed)])
    noise, generator = d.batch_noise, generator_for(seed, "noise")
    histogram = np.bincount(data, minlength=d.layout.counters + 1)
    assert isinstance(noise, Noise)
    histogram += generator.binomial(N * noise.bits, noise.p, size=histogram.size)
    return private_counts(d, histogram)


@pytest.mark.parametrize("families", ["paper", "lean", "joint"])
@pytest.mark.parametrize("layer", [None, 1])
def test_without_noise_the_counts_are_the_episodes(families: Families, layer: int | None) -> None:
    d = batch(families, layer)
    layout: CounterLayout = d.layout
    data = np.concatenate([layout.encode(episode) for episode in episodes(1)])
    histogram = np.bincount(data, minlength=layout.counters + 1).astype(np.float64)
    histogram[: layout.counters] += d.batch_noise.mean(N)  # exactly the expected noise
    counts = private_counts(d, histogram)  # type: ignore[arg-type]
    steps = range(2) if layer is None else [layer]
    for row, h in enumerate(steps):
        for e in episodes(1):
            x, a, y, r = e.states[h], e.actions[h], e.states[h + 1], e.rewards[h]
            counts.transitions[row, x, a, y] -= 1
            if families == "paper":
                counts.visits[row, x, a] -= 1
            if counts.rewards is not None:
                counts.rewards[row, x, a] -= r
    assert np.abs(counts.transitions).max() < 1e-9
    if families == "paper":
        assert np.abs(counts.visits).max() < 1e-9
    else:
        assert counts.visits.sum() == pytest.approx(N * len(steps))
    assert (counts.rewards is None) == (layer is not None)
    if counts.rewards is not None:
        assert np.abs(counts.rewards).max() < 1e-9


@pytest.mark.parametrize("families", ["paper", "lean", "joint"])
def test_variances_are_those_of_the_noise(families: Families) -> None:
    """With 100 batches, 800 entries or more in a family: the variance is within 25 % (5 sigma)."""
    d = batch(families, None)
    exact = [np.zeros(shape) for shape in ((2, 2, 2, 2), (2, 2, 2), (2, 2, 2))]
    errors: list[list[float]] = [[], [], []]
    for seed in range(100):
        counts = counted(d, seed)
        assert counts.rewards is not None
        for array in exact:
            array[:] = 0
        for e in episodes(seed):
            for h in range(2):
                x, a, y, r = e.states[h], e.actions[h], e.states[h + 1], e.rewards[h]
                exact[0][h, x, a, y] += 1
                exact[1][h, x, a] += 1
                exact[2][h, x, a] += r
        for kind, array in enumerate((counts.transitions, counts.visits, counts.rewards)):
            errors[kind].extend((array - exact[kind]).ravel())
    claimed = (counts.transition_variance, counts.visit_variance, counts.reward_variance)
    for result, variance in zip(errors, claimed, strict=True):
        assert np.ptp(variance) == 0
        assert np.var(result) == pytest.approx(variance.mean(), rel=0.25)
        assert abs(np.mean(result)) < 5 * math.sqrt(variance.mean() / len(result) * 8)


def test_the_planned_noise_is_the_batchs() -> None:
    d = batch("joint", None)
    assert noise_variance(spec(epsilon=2.0), N, None) == d.batch_noise.variance(N)


def test_a_histogram_of_another_size_is_refused() -> None:
    d = batch("joint", None)
    with pytest.raises(ValueError, match="entries for"):
        private_counts(d, np.zeros(d.layout.counters, dtype=np.int64))


def test_the_value_is_within_its_radius() -> None:
    """With delta = 0.2 over 200 batches: the bound is loose, so half of that would be a fault."""
    d = batch("joint", None)
    truth = 1.0  # each of two steps moves by the action and a fair bit, so ends in 1 half the time
    estimates = [value_estimate(counted(d, seed), 0.2) for seed in range(200)]
    values = [e for e in estimates if e is not None]
    assert sum(abs(e.value - truth) > e.radius for e in values) <= 20
    spread = np.std([e.value for e in values])
    assert abs(np.mean([e.value for e in values]) - truth) < 5 * spread / math.sqrt(200)
    assert values[0].noise_deviation < spread


@pytest.mark.parametrize(("report", "value"), [(-1.0, 0.0), (3.0, 2.0)])
def test_a_poisoned_value_stays_between_0_and_the_horizon(report: float, value: float) -> None:
    counts = counted(batch("joint", None), 0)
    assert counts.rewards is not None
    rewards = np.full(counts.rewards.shape, report * N / counts.rewards.size)
    result = value_estimate(replace(counts, rewards=rewards), 0.2)
    assert result is not None and result.value == value


def test_a_batch_without_rewards_has_no_value() -> None:
    assert value_estimate(counted(batch("joint", 0), 1), 0.1) is None
