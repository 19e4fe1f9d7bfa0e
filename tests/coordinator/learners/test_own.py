"""The base class of learners: its books, its checks, its plain model."""

from dataclasses import replace

import numpy as np
import pytest

from riffle.common.mechanism.counters import CounterLayout, Sizes
from riffle.common.mechanism.parameters import Padding
from riffle.coordinator.learners.own import OwnLearner, estimate
from riffle.coordinator.learning.learner import BatchCounts, Deployment, LearnerError, Problem
from riffle.experiments.regret import optimal_value, policy_value
from riffle.experiments.simulator import Mechanism, simulate
from riffle.node_client.environments.tabular import riverswim

MDP = riverswim(3, 3)


def problem(K: int = 1000) -> Problem:
    return Problem(MDP.sizes, MDP.d1, K, 1.0, 1e-5, 0.05, "joint", lambda n, layer: 0.0)


class Half(OwnLearner):
    def next_deployment(self) -> Deployment | None:
        if self.batches == 0:
            return self.deploy(self.explorers(8), self.problem.K // 2)
        return self.deploy(self.policy, self.left) if self.left else None

    def observe(self, counts: BatchCounts) -> None:
        super().observe(counts)
        if self.batches == 1:
            self.improve(counts)


def test_without_noise_the_best_policy_is_found_and_every_episode_is_used() -> None:
    learner = Half(problem(20_000), half=True)
    run = simulate(MDP, learner, "joint", lambda layout, n: Mechanism(None, Padding(3, 0)), 0)
    assert [d.n for d in run.deployments] == [10_000, 10_000]
    assert policy_value(MDP, run.summary.policy) == pytest.approx(optimal_value(MDP))
    assert run.summary.value_estimate == pytest.approx(optimal_value(MDP), abs=0.02)
    assert (run.summary.finished, run.summary.episodes_used) == (True, 20_000)
    assert run.summary.constants == {"half": True}


def test_next_deployment_may_be_asked_twice() -> None:
    learner = Half(problem())
    one, other = learner.next_deployment(), learner.next_deployment()
    assert one is not None
    assert other is not None
    assert one.mixture.same_as(other.mixture)


def counts_of(layout: CounterLayout, n: int, visits: float) -> BatchCounts:
    X, A, hs = layout.sizes.X, layout.sizes.A, layout.layers
    ones = np.full((hs, X, A, X), visits / X)
    four = np.full(ones.shape, 4.0)
    noise = (four, four[..., 0], four[..., 0])
    return BatchCounts(layout, n, ones, ones.sum(-1), ones.sum(-1) / 2, *noise)


def test_counts_of_something_else_are_refused() -> None:
    learner = Half(problem())
    wrong = [
        counts_of(CounterLayout(MDP.sizes, "joint", None), 499, 9.0),
        counts_of(CounterLayout(MDP.sizes, "joint", 1), 500, 9.0),
    ]
    for counts in wrong:
        with pytest.raises(LearnerError, match="asked for"):
            learner.observe(counts)
    assert (learner.left, learner.batches) == (1000, 0)


@pytest.mark.parametrize(
    ("policies", "n", "says"),
    [
        (np.zeros((3, 3)), 0, "cannot deploy 0"),
        (np.zeros((3, 3)), 1001, "1000 of K are left"),
        (np.zeros((2, 3)), 10, "shape"),
        (np.full((3, 3), 2), 10, "action"),
    ],
)
def test_a_wrong_deployment_is_refused(policies: object, n: int, says: str) -> None:
    with pytest.raises(LearnerError, match=says):
        Half(problem()).deploy(policies, n)  # type: ignore[arg-type]


def test_a_model_of_counts_is_their_ratios_and_noise_alone_is_no_reward() -> None:
    layout = CounterLayout(Sizes(3, 2, 3), "joint", None)
    P, r = estimate(counts_of(layout, 500, 90.0))
    np.testing.assert_allclose(P, 1 / 3)
    np.testing.assert_allclose(r, 0.5)
    P, r = estimate(counts_of(layout, 500, 0.6))  # a third of the noise's deviation of 2
    np.testing.assert_allclose(P.sum(-1), 0.3)
    np.testing.assert_allclose(r, 0.15)


def test_a_model_needs_rewards() -> None:
    layer = CounterLayout(MDP.sizes, "joint", 0)
    with pytest.raises(LearnerError, match="layer=None"):
        estimate(replace(counts_of(layer, 10, 1.0), rewards=None))
