"""Tests of counts for lies: the false alarms of honest batches, and which lies are found."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy import stats

from riffle.common.mechanism.counters import CounterLayout, Families, Ints, Sizes
from riffle.common.mechanism.parameters import BatchNoise, Trust
from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import generator_for
from riffle.common.mechanism.workflow import debias
from riffle.coordinator.batches.counts import FALSE_ALARM, CountCheck, check
from riffle.coordinator.batches.issue import calibrated
from riffle.coordinator.learning.learner import BatchCounts, batch_counts
from riffle.coordinator.learning.planning import plan
from riffle.experiments.simulator import counters, joint_counts, noisy_counts
from riffle.node_client.environments.tabular import TabularMDP, random_mdp, riverswim
from tests.coordinator.world import spec

N = 20_000
FAMILIES: tuple[Families, ...] = ("paper", "lean", "joint")
TRUSTS: tuple[Trust, ...] = ("shuffle", "local", "central")
LAYERS = (None, 0, 2)
RIVER = riverswim()


def worlds() -> Sequence[TabularMDP]:
    """One that starts in state 0, and one that starts anywhere and changes with every step."""
    elsewhere = random_mdp(Sizes(3, 2, 4), 7)
    return RIVER, replace(elsewhere, d1=np.array([0.2, 0.5, 0.3]))


@cache
def noise_of(
    sizes: Sizes, families: Families, trust: Trust, layer: int | None
) -> tuple[BatchNoise, int]:
    """Returns the noise and L of a batch."""
    wanted = spec(
        states=sizes.X, actions=sizes.A, horizon=sizes.H, families=families, trust=trust,
        epsilon=1.0, beta=1e-5, episodes=N,
    )  # fmt: skip
    calibration = calibrated(wanted, N, layer)
    return calibration.noise, calibration.padding.messages


class World:
    """Batches of N reports, k of them dishonest."""

    def __init__(
        self, mdp: TabularMDP, families: Families, trust: Trust, layer: int | None
    ) -> None:
        self.mdp, self.layout = mdp, CounterLayout(mdp.sizes, families, layer)
        self.noise, self.L = noise_of(mdp.sizes, families, trust, layer)
        best = plan(mdp.P, mdp.r, mdp.d1).policy
        self.mixture = Mixture.from_probabilities(np.stack([best, 0 * best]), [0.6, 0.4])

    def counts(self, seed: int, liars: int = 0, lies: Ints | None = None) -> BatchCounts:
        """Counts with the noise of the honest ones, and ``lies`` (C,) of the others."""
        generator = generator_for(seed, "check")
        episodes = joint_counts(self.mdp, self.mixture, N - liars, generator)
        true = counters(self.layout, episodes)
        noisy = noisy_counts(true, N - liars, self.noise, generator)
        histogram = np.append(noisy if lies is None else noisy + lies, N)
        debiased, noise = debias(self.noise, N, histogram), self.noise
        return batch_counts(self.layout, N, debiased, noise.variance(N), noise.term)

    def check(self, seed: int, liars: int = 0, lies: Ints | None = None) -> CountCheck:
        return check(self.counts(seed, liars, lies), self.mdp.d1)

    def one_counter(self, liars: int, family: str | None = None) -> Ints:
        """All messages of liars on the first counter, or on the first of a family."""
        blocks = self.layout.split(np.arange(self.layout.counters, dtype=np.float64))
        at = int(blocks[family].flat[0]) if family else 0
        return np.bincount(np.full(liars * self.L, at), minlength=self.layout.counters)


def honest(batches: int) -> list[CountCheck]:
    return [
        World(mdp, families, trust, layer).check(seed)
        for mdp in worlds()
        for families in FAMILIES
        for trust in TRUSTS
        for layer in LAYERS
        for seed in range(batches)
    ]


def test_honest_batches_are_marked_no_more_often_than_stated() -> None:
    """1,080 batches; with 5 % the binomial bound is passed with a probability of 1e-6."""
    checks = honest(20)
    often = sum(one.chance < 0.05 for one in checks)
    assert often <= stats.binom.ppf(1 - 1e-6, len(checks), 0.05)
    assert not any(one.suspicious for one in checks)
    assert FALSE_ALARM <= 1e-5
    assert {one.test for one in checks} == {
        *("flow", "total", "negative", "start", "visits", "rewards")
    }


def test_noise_that_is_larger_than_stated_would_be_found() -> None:
    """The test above can fail: with a fourth of the variance nearly every batch is marked."""
    world = World(RIVER, "joint", "shuffle", None)
    smaller = {"transition_variance": 0.06, "visit_variance": 0.06, "reward_variance": 0.06}
    for seed in range(5):
        counts = world.counts(seed)
        scaled = {name: share * getattr(counts, name) for name, share in smaller.items()}
        assert check(replace(counts, **scaled), RIVER.d1).suspicious


@pytest.mark.parametrize("families", FAMILIES)
@pytest.mark.parametrize(("share", "found"), [(0.001, 0.95), (0.01, 1.0), (0.05, 1.0)])
def test_lies_on_one_counter_are_found(families: Families, share: float, found: float) -> None:
    world, k = World(RIVER, families, "shuffle", None), int(share * N)
    marked = [world.check(seed, k, world.one_counter(k)).suspicious for seed in range(20)]
    assert np.mean(marked) >= found


@pytest.mark.parametrize("trust", ["local", "central"])
def test_lies_under_the_other_trust_models_are_found_at_5_percent(trust: Trust) -> None:
    world, k = World(RIVER, "joint", trust, None), N // 20
    assert all(world.check(seed, k, world.one_counter(k)).suspicious for seed in range(10))


@pytest.mark.parametrize(
    ("families", "family", "test"),
    [("paper", "visits", "visits"), ("lean", "rewards", "rewards"), ("joint", None, "start")],
)
def test_each_family_has_a_test(families: Families, family: str | None, test: str) -> None:
    """A reward that exceeds its visits, visits that are no sum of transitions, a wrong start."""
    world, k = World(RIVER, families, "shuffle", None), N // 20
    lies = world.one_counter(k, family)
    if family == "rewards":  # of a pair that hardly anybody visits: state 3 at step 0
        lies = np.roll(lies, 3 * RIVER.sizes.A)
    one = world.check(1, k, lies)
    assert (one.suspicious, one.test) == (True, test)


def test_silence_is_found_by_the_total() -> None:
    world = World(RIVER, "joint", "shuffle", None)
    checks = [world.check(seed, N // 20) for seed in range(10)]
    assert all(one.suspicious and one.test == "total" for one in checks)


def without_data(world: World, seed: int, share: int = 20) -> BatchCounts:
    """The counts of honest reports, of which N // share have noise and no data."""
    k, generator = N // share, generator_for(seed, "quiet")
    noise = noisy_counts(np.zeros(world.layout.counters, np.int64), k, world.noise, generator)
    return world.counts(seed, k, noise)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("families", FAMILIES)
def test_reports_without_data_can_be_allowed(families: Families, layer: int | None) -> None:
    """5 % of the people are slow, or their environment failed; lies are found all the same."""
    for mdp in worlds():
        world = World(mdp, families, "shuffle", layer)
        for seed in range(3):
            counts = without_data(world, seed)
            assert layer is not None or check(counts, mdp.d1).test == "total"
            assert not check(counts, mdp.d1, without_data=N // 20).suspicious
            assert check(counts, mdp.d1, without_data=N // 100).suspicious
            for lie in (N, -N, 2**15):
                told = counts.transitions.copy()
                told[0, 0, 0, 0] += lie
                assert check(replace(counts, transitions=told), mdp.d1, N // 20).suspicious


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("families", FAMILIES)
def test_reports_without_data_explain_no_surplus(families: Families, layer: int | None) -> None:
    """Whole episodes of more people than took part, as one report of sums can add them."""
    for mdp in worlds():
        counts = World(mdp, families, "shuffle", layer).counts(0)
        more = {
            name: 1.05 * value
            for name in ("transitions", "visits", "rewards")
            if (value := getattr(counts, name)) is not None
        }
        assert check(replace(counts, **more), mdp.d1, without_data=N // 20).suspicious


def test_whole_episodes_are_not_found() -> None:
    """A lie that is an episode, with noise, is a report like any other: it counts once."""
    world, k, X, A, H = World(RIVER, "joint", "shuffle", None), N // 20, 4, 2, 6
    lies = np.zeros((H, X, A, X, 2), np.int64)
    lies[:, 0, 0, 0, 1] = k
    generator = generator_for(0, "liars")
    noisy = noisy_counts(lies.ravel(), k, world.noise, generator)
    assert not any(world.check(seed, k, noisy).suspicious for seed in range(10))


def test_an_environment_that_starts_elsewhere_is_found() -> None:
    world = World(worlds()[1], "joint", "shuffle", None)
    declared = np.array([1.0, 0.0, 0.0])
    one = check(world.counts(0), declared)
    assert (one.suspicious, one.test) == (True, "start")
    assert one.chance < FALSE_ALARM and one.deviation > 5
